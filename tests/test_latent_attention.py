"""Attention over latents: by pages, and (in Triton's interpreter) by its kernels, against the written-out reference.

The interpreter has to be chosen before Triton is imported, so its tests run in a process of their own: without
`TRITON_INTERPRET=1` this file runs them from a single test. Rows lie in memory that is poisoned with NaN around them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hf_kvcache.ops.attention import Extras, merge
from hf_kvcache.ops.decode_attention import PackedRows
from hf_kvcache.ops.latent_attention import cpu, latent_attention, reference
from hf_kvcache.ops.packed import Format, Packed
from hf_kvcache.ops.quantize_pack import reference as quantize_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
NAN = float("nan")


def turn(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size))[0]


@dataclass(frozen=True)
class Case:
    packed: int = 0
    tail: int = 5
    front: int = 0
    rank: int = 64
    rope: int = 32
    heads: int = 16
    queries: int = 1
    batch: int = 1
    bits: int = 4
    rope_bits: int = 8
    kind: str = "symmetric"
    axis: str = "token"
    group: int | None = None
    turned: bool = True
    mean: bool = True
    mask: bool = False
    bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32


def buffer(x: torch.Tensor) -> torch.Tensor:
    """The same rows in a buffer that has more of them, all NaN."""
    room = torch.full((*x.shape[:2], x.shape[2] + 7, x.shape[3]), NAN, dtype=x.dtype)
    room[:, :, : x.shape[2]] = x
    return room[:, :, : x.shape[2]]


def packed(x: torch.Tensor, fmt: Format, role: str, length: int) -> Packed:
    rows = quantize_reference.quantize_pack(x, fmt, role)
    axis = 2 if role == "keys" else 3
    after = list(rows.codes.shape)
    after[axis] = 1
    codes = torch.cat([rows.codes, torch.randint(0, 256, after, dtype=torch.uint8)], dim=axis)
    used = -(-length // fmt.group) if fmt.axis == "channel" else length

    def spoiled(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        room = torch.full((*t.shape[:2], t.shape[2] + 64, t.shape[3]), NAN, dtype=t.dtype)
        room[:, :, :used] = t[:, :, :used]
        return room

    scale = spoiled(rows.scale)
    assert scale is not None
    return Packed(codes, scale, spoiled(rows.zero))


def inputs(case: Case):
    torch.manual_seed(1)
    b, c = case.batch, case

    def exact(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = torch.randn(b, 1, rows, c.rank), torch.randn(b, 1, rows, c.rope)
        return buffer(latent.to(c.dtype)), buffer(rope.to(c.dtype))

    parts = [exact(c.front)] if c.front else []
    if c.packed:
        kf = Format(c.bits, c.axis, c.group or c.rank, c.kind)
        vf = Format(c.rope_bits, "token", c.group or c.rope, c.kind)
        n = -(-c.packed // kf.group) * kf.group if c.axis == "channel" else c.packed
        parts.append(
            PackedRows(
                packed(torch.randn(b, 1, n, c.rank), kf, "keys", c.packed),
                packed(torch.randn(b, 1, n, c.rope), vf, "values", c.packed),
                kf, vf, c.packed, 32,
                key_turn=turn(c.rank) if c.turned else None,
                key_mean=torch.randn(b, 1, c.rank).half() if c.mean else None,
                value_turn=turn(c.rope) if c.turned else None,
            )
        )  # fmt: skip
    parts.append(exact(c.tail))
    total = c.front + c.packed + c.tail
    query, rope = torch.randn(b, c.heads, c.queries, c.rank), torch.randn(b, c.heads, c.queries, c.rope)
    visible = None
    if c.mask:
        visible = torch.ones(b, 1, c.queries, total, dtype=torch.bool)
        visible[0, :, :, : total // 3] = False
        visible[..., -1, total // 2] = False
    bias = torch.randn(b, c.heads, 1, total) if c.bias else None
    sinks = torch.randn(c.heads) if c.sinks else None
    extras = Extras((c.rank + c.rope) ** -0.5, c.softcap, sinks)
    return query.to(c.dtype), rope.to(c.dtype), parts, extras, visible, bias


def wanted(case: Case):
    query, rope, parts, *others = inputs(case)
    return reference.latent_attention(query, rope, parts, *others, need_probs=True, need_lse=True)


def compare(case: Case, run, tolerance: float, probs: bool = False) -> None:
    ours, right = run(*inputs(case)), wanted(case)
    assert ours.output.shape == right.output.shape and ours.output.dtype == case.dtype
    assert float((ours.output.float() - right.output.float()).abs().max()) < tolerance
    assert float((ours.lse - right.lse).abs().max()) < tolerance
    if probs:
        assert float((ours.probs - right.probs).abs().max()) < tolerance


LENGTHS = [Case(packed=n, tail=1) for n in (1, 63, 64, 111, 257)] + [Case(tail=n) for n in (1, 63, 64, 111, 257)]
CASES = [
    *LENGTHS,
    Case(packed=97, front=3, tail=6, batch=2, mask=True, bias=True, queries=3, heads=7),
    Case(packed=130, sinks=True, softcap=5.0, rope_bits=4, bits=8, turned=False),
    Case(packed=70, rank=192, rope=64, mean=False, heads=20),
    Case(packed=64, front=2, tail=0),
    Case(tail=40, sinks=True, softcap=3.0, mask=True, heads=33, rank=96, rope=16),
]
PAGED = [
    Case(packed=2500, bits=4, kind="affine", axis="channel", group=96, turned=False, mean=False, rank=96, rope=96),
    Case(packed=200, bits=2, kind="affine", group=16, turned=False, mean=False),
    Case(packed=2300, bits=4),
    Case(packed=140, bits=8, kind="float8", mean=True, turned=False),
]


@pytest.mark.parametrize("case", CASES + PAGED, ids=str)
def test_by_pages(case: Case) -> None:
    def run(*arguments):
        return cpu.latent_attention(*arguments, need_probs=True, need_lse=True)

    compare(case, run, 2e-5, probs=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_by_pages_in_16_bits(dtype: torch.dtype) -> None:
    for case in (Case(packed=97, front=3, tail=60, batch=2, dtype=dtype), Case(tail=200, mask=True, dtype=dtype)):
        compare(case, lambda *a: latent_attention(*a, need_lse=True), 0.05)


def test_blocks_merge_into_the_whole() -> None:
    case = Case(packed=97, front=3, tail=60)
    query, rope, parts, *others = inputs(case)
    blocks = [cpu.latent_attention(query, rope, [part], *others, need_lse=True) for part in parts]
    assert float((merge(blocks) - wanted(case).output).abs().max()) < 1e-5


def test_gradients_pass() -> None:
    query, rope, parts, *others = inputs(Case(tail=9))
    grads = []
    for function in (reference.latent_attention, latent_attention):
        x = query.clone().requires_grad_()
        function(x, rope, parts, *others).output.square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, atol=1e-5)


def test_a_query_that_sees_nothing_stays_finite() -> None:
    query, rope, parts, extras, *_ = inputs(Case(packed=70, tail=9))
    nothing = torch.zeros(1, 1, 1, 79, dtype=torch.bool)
    assert torch.isfinite(cpu.latent_attention(query, rope, parts, extras, nothing).output).all()


# ---------------------------------------------------------------------- Triton


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this is the process of the interpreter")
def test_triton_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "kernels"]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout


if INTERPRETED:

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_kernels(case: Case) -> None:
        from hf_kvcache.ops.latent_attention import triton as kernels

        for dtype, tolerance in ((torch.float32, 2e-3 if case.packed else 2e-5), (torch.float16, 1e-2)):
            typed = replace(case, dtype=dtype)
            assert kernels.supports(*inputs(typed))
            compare(typed, lambda *a: kernels.latent_attention(*a, need_lse=True), tolerance)

    def test_kernels_of_several_splits() -> None:
        from hf_kvcache.ops.latent_attention import triton as kernels

        config = kernels.Config(16, 16, 4, 1, programs=8)
        case = Case(packed=257, front=40, tail=70, batch=2)
        compare(case, lambda *a: kernels.latent_attention(*a, need_lse=True, config=config), 2e-3)
        launches, _ = kernels.plan(*inputs(case), config=config)
        assert [launch.args["splits"] for launch in launches[:-1]] == [1, 2, 2]

    def test_kernels_keep_a_blind_query_finite() -> None:
        from hf_kvcache.ops.latent_attention import triton as kernels

        query, rope, parts, extras, *_ = inputs(Case(packed=70, tail=9))
        nothing = torch.zeros(1, 1, 1, 79, dtype=torch.bool)
        assert torch.isfinite(kernels.latent_attention(query, rope, parts, extras, nothing).output).all()

    def test_kernels_leave_other_formats_to_the_pages() -> None:
        from hf_kvcache.ops.latent_attention import triton as kernels

        for case in PAGED[:2] + PAGED[3:] + [Case(tail=8, rank=576), Case(packed=64, rope=16)]:
            assert not kernels.supports(*inputs(case))
        assert not kernels.supports(*inputs(Case()), need_probs=True)
