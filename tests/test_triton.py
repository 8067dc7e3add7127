"""The Triton kernels in Triton's interpreter (no GPU needed) against plain torch, over poisoned memory.

The interpreter has to be chosen before Triton is imported, so the tests run in a process of their own: without
`TRITON_INTERPRET=1` this file holds a single test, which runs it again with it.
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

from hf_kvcache.ops.attention import Extras
from hf_kvcache.ops.column_sums import reference as column_sums_reference
from hf_kvcache.ops.decode_attention.dispatch import PackedRows
from hf_kvcache.ops.dequantize import reference as dequantize_reference
from hf_kvcache.ops.gather_rows import gather_rows
from hf_kvcache.ops.gather_rows import reference as gather_reference
from hf_kvcache.ops.packed import Format, Packed
from hf_kvcache.ops.quantize_pack import reference as quantize_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
NAN = float("nan")


def interpreted(test):
    """The test, in the interpreter's process; elsewhere there is none of that name."""
    return test if INTERPRETED else None


def levels_of(kind: str, bits: int) -> tuple[float, ...] | None:
    return tuple(torch.linspace(-2, 2, 2**bits).pow(3).div(4).tolist()) if kind == "codebook" else None


@dataclass(frozen=True)
class Case:
    bits: int
    length: int
    dim: int = 64
    axis: str = "channel"
    kind: str = "affine"
    group: int = 32
    value_group: int = 32
    value_bits: int | None = None
    batch: int = 1
    heads: int = 1
    per_head: int = 2  # query heads of a KV head
    queries: int = 1
    front: int = 0
    tail: int = 5
    softcap: float | None = None
    sinks: bool = False
    mask: str = ""  # "padding" or "heads"
    bias: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def formats(self) -> tuple[Format, Format]:
        bits = self.value_bits or self.bits
        keys = Format(self.bits, self.axis, self.group, self.kind, levels_of(self.kind, self.bits))
        return keys, Format(bits, "token", self.value_group, self.kind, levels_of(self.kind, bits))


def poisoned_buffer(x: torch.Tensor, room: int = 7) -> torch.Tensor:
    """The same rows as a view into a buffer that is NaN everywhere else."""
    buffer = torch.full((*x.shape[:2], x.shape[2] + room, *x.shape[3:]), NAN, dtype=x.dtype)
    buffer[:, :, : x.shape[2]] = x
    return buffer[:, :, : x.shape[2]]


def poisoned_packed(x: torch.Tensor, fmt: Format, role: str, length: int) -> Packed:
    """Packed rows in buffers one tile larger than needed: random codes and NaN scales beyond `length`."""
    packed = quantize_reference.quantize_pack(x, fmt, role)
    axis = 2 if role == "keys" else 3
    after = list(packed.codes.shape)
    after[axis] = 1
    codes = torch.cat([packed.codes, torch.randint(0, 256, after, dtype=torch.uint8)], dim=axis)
    used = -(-length // fmt.group) if fmt.axis == "channel" else length

    def spoiled(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        buffer = torch.full((*t.shape[:2], t.shape[2] + 64, t.shape[3]), NAN, dtype=t.dtype)
        buffer[:, :, :used] = t[:, :, :used]
        return buffer

    scale = spoiled(packed.scale)
    assert scale is not None
    return Packed(codes, scale, spoiled(packed.zero))


def inputs(case: Case):
    torch.manual_seed(case.seed)
    kf, vf = case.formats
    n = -(-case.length // kf.group) * kf.group if kf.axis == "channel" else case.length
    shape = (case.batch, case.heads)
    packed = PackedRows(
        poisoned_packed(torch.randn(*shape, n, case.dim), kf, "keys", case.length),
        poisoned_packed(torch.randn(*shape, n, case.dim), vf, "values", case.length),
        kf, vf, case.length, 32,
    )  # fmt: skip

    def exact(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(poisoned_buffer(torch.randn(*shape, rows, case.dim, dtype=case.dtype)) for _ in range(2))

    query = torch.randn(case.batch, case.heads * case.per_head, case.queries, case.dim, dtype=case.dtype)
    rows = case.front + case.length + case.tail
    visible = None
    if case.mask == "padding":
        visible = torch.ones(case.batch, 1, 1, rows, dtype=torch.bool)
        visible[0, :, :, : min(case.length // 2, rows - 1)] = False
    elif case.mask == "heads":
        visible = torch.rand(case.batch, case.heads, case.queries, rows) > 0.4
        visible[..., -1] = True
    bias = torch.randn(1, case.heads * case.per_head, case.queries, rows) if case.bias else None
    sinks = torch.randn(case.heads * case.per_head) if case.sinks else None
    extras = Extras(case.dim**-0.5, case.softcap, sinks)
    return query, exact(case.front) if case.front else None, packed, exact(case.tail), extras, visible, bias


def dense(query, front, packed, tail, extras, visible, bias):
    """Output and log-sum-exp by definition, in float64."""
    rows = [] if packed is None else [unpacked(packed)]
    pairs = [*([front] if front else []), *rows, tail]
    keys, values = (torch.cat([pair[i].double() for pair in pairs], dim=2) for i in range(2))
    group = query.shape[1] // keys.shape[1]
    logits = query.double() @ keys.repeat_interleave(group, 1).transpose(-1, -2) * extras.scaling
    if extras.softcap:
        logits = extras.softcap * torch.tanh(logits / extras.softcap)
    if bias is not None:
        logits = logits + bias.double()
    if visible is not None:
        wide = visible.repeat_interleave(group, 1) if visible.shape[1] > 1 else visible
        logits = logits.masked_fill(~wide, float("-inf"))
    if extras.sinks is not None:
        column = extras.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    probs = torch.softmax(logits, dim=-1)[..., : keys.shape[2]]
    return probs @ values.repeat_interleave(group, 1), torch.logsumexp(logits, dim=-1)


def unpacked(packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[B, H, length, D]` of packed rows in the model's coordinates, float64."""
    dim_k = packed.keys.codes.shape[3] * 4 // packed.key_format.bits
    codes = packed.values.codes.shape
    k = dequantize_reference.dequantize(
        packed.keys, packed.key_format, "keys", dim_k, packed.length, torch.float64
    )  # fmt: skip
    v = dequantize_reference.dequantize(
        packed.values, packed.value_format, "values", codes[2] * 2 * codes[5], packed.length, torch.float64
    )
    if packed.key_turn is not None:
        k = k @ packed.key_turn.double().transpose(-1, -2)
    if packed.key_scale is not None:
        k = k * packed.key_scale[:, :, None].double()
    if packed.key_mean is not None:
        k = k + packed.key_mean[:, :, None].double()
    if packed.value_turn is not None:
        v = v @ packed.value_turn.double().transpose(-1, -2)
    return k, v


def check(block, expected, atol: float = 2e-3) -> None:
    torch.testing.assert_close(block.output.double(), expected[0], atol=atol, rtol=2e-3)
    if block.lse is not None:
        torch.testing.assert_close(block.lse.double(), expected[1], atol=atol, rtol=1e-3)


def test_in_the_interpreter() -> None:
    """All tests below, in a process that interprets the kernels."""
    if INTERPRETED:
        return
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_gpu_check_without_a_gpu() -> None:
    """`tests/gpu/check.py` runs as far as it can, and says when it cannot."""
    if INTERPRETED:
        return
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, str(Path(__file__).parent / "gpu" / "check.py")]
    dry = subprocess.run([*command, "--dry"], capture_output=True, text=True)
    assert dry.returncode == 0, dry.stdout[-4000:] + dry.stderr[-2000:]
    assert "0 wrong" in dry.stdout
    if not torch.cuda.is_available():
        none = subprocess.run(command, capture_output=True, text=True)
        assert none.returncode == 2 and "no GPU" in none.stderr


CASES = [
    *(Case(bits, length) for bits in (2, 3, 4, 8) for length in (1, 63, 64)),
    *(Case(bits, 111, axis="token", group=64, value_group=64, front=3) for bits in (2, 3, 4, 8)),
    Case(2, 257, per_head=1, heads=2, group=64),
    Case(4, 257, per_head=1, mask="padding", batch=2),
    Case(3, 111, axis="token", group=32, queries=3, mask="heads", heads=2),
    Case(4, 111, dim=128, per_head=4, queries=3, sinks=True, mask="padding", batch=2),
    Case(2, 111, dim=128, front=4, softcap=5.0, sinks=True, bias=True, queries=3),
    Case(8, 64, dim=96, front=1, bias=True),
    Case(3, 64, dim=96, axis="token", group=96),
    Case(2, 65, dim=80, value_group=16),
    Case(4, 65, dim=80, axis="token", group=16, value_group=80),
    Case(4, 111, value_bits=2, softcap=2.0),
    Case(2, 70, value_bits=8, value_group=16, dtype=torch.float16, front=2),
    Case(4, 70, kind="symmetric"),
    Case(3, 70, kind="symmetric", axis="token", group=64, value_group=64),
    *(Case(bits, 70, kind="codebook", axis="token", group=64, value_group=64) for bits in (2, 3, 4)),
    Case(8, 70, kind="float8", axis="token", group=32, value_group=64),
    Case(8, 70, kind="float8", value_group=64),
    Case(3, 70, kind="codebook", group=64, value_group=64),
    Case(4, 64, tail=130, front=40, mask="heads", queries=2),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_attention(case: Case) -> None:
    from hf_kvcache.ops.decode_attention import triton

    case = replace(case, seed=case.length + case.bits)
    query, front, packed, tail, extras, visible, bias = inputs(case)
    expected = dense(query, front, packed, tail, extras, visible, bias)
    assert triton.supports(query, packed, tail, extras)
    got = triton.decode_attention(query, front, packed, tail, extras, visible, bias, need_lse=True)
    assert got.output.dtype == query.dtype
    check(got, expected)


@interpreted
def test_more_splits_than_tiles_and_exact_rows_alone() -> None:
    from hf_kvcache.ops import tuning
    from hf_kvcache.ops.decode_attention import triton

    query, front, packed, tail, extras, visible, bias = inputs(Case(4, 130, front=3, tail=70))
    expected = dense(query, front, packed, tail, extras, visible, bias)
    one = tuning.lookup("sm_90", 4, 64)._replace(programs=1)
    many = one._replace(programs=64, min_tiles=1, block_n=16)
    for entry in (one, many):
        check(triton.decode_attention(query, front, packed, tail, extras, need_lse=True, entry=entry), expected)
    alone = triton.decode_attention(query, front, None, tail, extras, need_lse=True)
    check(alone, dense(query, front, None, tail, extras, visible, bias))


@interpreted
def test_a_fully_masked_query_is_finite() -> None:
    from hf_kvcache.ops.decode_attention import triton

    query, front, packed, tail, extras, _, _ = inputs(Case(4, 70, queries=2))
    visible = torch.ones(1, 1, 2, 75, dtype=torch.bool)
    visible[:, :, 0] = False
    got = triton.decode_attention(query, front, packed, tail, extras, visible, need_lse=True)
    assert got.output.isfinite().all() and got.lse.isfinite().all()
    assert (got.lse[:, :, 0] < -1e30).all()


@interpreted
@pytest.mark.parametrize("bits", [2, 4])
def test_turned_keys_and_values(bits: int) -> None:
    from hf_kvcache.ops.decode_attention import triton

    case = Case(bits, 111, kind="symmetric", axis="token", group=64, value_group=64, heads=2, front=3, queries=2)
    query, front, packed, tail, extras, visible, bias = inputs(case)
    turn = torch.linalg.qr(torch.randn(2, 64, 64))[0]
    packed = packed._replace(
        key_turn=turn[0:1], value_turn=turn, key_mean=torch.randn(1, 2, 64), key_scale=torch.rand(1, 2, 64) + 0.5
    )
    expected = dense(query, front, packed, tail, extras, visible, bias)
    check(triton.decode_attention(query, front, packed, tail, extras, need_lse=True), expected)


@interpreted
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_lengths_on_the_device(axis: str) -> None:
    """Each batch row has a length of its own, known to the device only; the grid follows the capacity."""
    from hf_kvcache.ops.decode_attention import triton

    case = Case(4, 150, batch=3, axis=axis, tail=20, front=2, mask="heads")
    query, front, packed, tail, extras, visible, bias = inputs(case)
    lengths, tails = torch.tensor([0, 65, 150], dtype=torch.int32), torch.tensor([20, 1, 7], dtype=torch.int32)
    column = torch.arange(2 + 150 + 20)
    inside = (column < 2) | ((column >= 2) & (column < 2 + lengths[:, None])) | (
        (column >= 152) & (column < 152 + tails[:, None])
    )  # fmt: skip
    visible[..., 0] = True
    seen = visible & inside[:, None, None]
    expected = dense(query, front, packed, tail, extras, seen, bias)
    got = triton.decode_attention(
        query, front, packed, tail, extras, visible, need_lse=True, lengths=lengths, tail_lengths=tails
    )
    check(got, expected)


@interpreted
@pytest.mark.parametrize("bits,axis", [(2, "channel"), (4, "token"), (4, "channel")])
def test_pages(bits: int, axis: str) -> None:
    """The same rows scattered over a pool of pages of two tiles."""
    from hf_kvcache.ops.decode_attention import triton

    case = Case(bits, 257, batch=2, axis=axis, heads=2)
    query, front, packed, tail, extras, visible, bias = inputs(case)
    expected = dense(query, front, packed, tail, extras, visible, bias)
    pages, per_row = 9, 3
    table = torch.randperm(pages)[: 2 * per_row].view(2, per_row).to(torch.int32)
    kf, vf = packed.key_format, packed.value_format

    def pool(tensor: torch.Tensor, dim: int, size: int, fill: float) -> torch.Tensor:
        """`size` entries of dimension `dim` become a page."""
        shape = [pages, *tensor.shape[1:]]
        shape[dim] = size
        out = torch.full(shape, fill, dtype=tensor.dtype)
        for row in range(2):
            for page in range(per_row):
                part = tensor[row].narrow(dim - 1, page * size, min(size, tensor.shape[dim] - page * size))
                out[table[row, page]].narrow(dim - 1, 0, part.shape[dim - 1]).copy_(part)
        return out

    keys, values = packed.keys, packed.values
    per_page = 128 // kf.group if axis == "channel" else 128
    scattered = packed._replace(
        keys=Packed(pool(keys.codes, 2, 2, 255), pool(keys.scale, 2, per_page, NAN), pool(keys.zero, 2, per_page, NAN)),
        values=Packed(pool(values.codes, 3, 2, 255), pool(values.scale, 2, 128, NAN), pool(values.zero, 2, 128, NAN)),
    )
    got = triton.decode_attention(
        query, front, scattered, tail, extras, visible, need_lse=True, block_table=table, page_tiles=2
    )
    check(got, expected)
    assert vf.per_token


FORMATS = [
    *(Format(bits, axis, 32) for bits in (2, 3, 4, 8) for axis in ("channel", "token")),
    Format(4, "token", 64, "symmetric"),
    Format(2, "channel", 32, "symmetric", fit="mse"),
    Format(3, "token", 32, "codebook", levels_of("codebook", 3), "unbiased"),
]


@interpreted
@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.kind}{f.bits}{f.axis}")
def test_quantize_pack_and_dequantize(fmt: Format, role: str) -> None:
    from hf_kvcache.ops.dequantize import triton as dequantize
    from hf_kvcache.ops.quantize_pack import triton as quantize

    dim = 96 if fmt.bits == 4 and fmt.group == 32 else 64
    x = poisoned_buffer(torch.randn(1, 2, 64, dim))
    x[0, 0, :32, :32] = 0.5  # groups without any spread
    lead = 5 if fmt.bits in (2, 4) else 0
    expected = quantize_reference.quantize_pack(x, fmt, role, 32, lead)
    assert quantize.supports(fmt, 32)
    got = quantize.quantize_pack(x, fmt, role, 32, lead)
    assert torch.equal(got.codes, expected.codes)
    if fmt.kind == "affine":
        assert torch.equal(got.scale, expected.scale) and torch.equal(got.zero, expected.zero)
    else:
        torch.testing.assert_close(got.scale, expected.scale, atol=1e-6, rtol=2e-3)
    rows = poisoned_packed(x, fmt, role, 64)
    whole = dequantize_reference.dequantize(rows, fmt, role, dim, 45, torch.float16)
    assert dequantize.supports(fmt, 32)
    torch.testing.assert_close(dequantize.dequantize(rows, fmt, role, dim, 45, torch.float16), whole)


@interpreted
def test_dequantize_float8() -> None:
    from hf_kvcache.ops.dequantize import triton as dequantize

    fmt = Format(8, "token", 64, "float8")
    packed = quantize_reference.quantize_pack(torch.randn(1, 1, 70, 64), fmt, "keys")
    expected = dequantize_reference.dequantize(packed, fmt, "keys", 64, 70, torch.float32)
    torch.testing.assert_close(dequantize.dequantize(packed, fmt, "keys", 64, 70, torch.float32), expected)


@interpreted
@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 63, 111])
def test_gather_rows_on_the_gpu(bits: int, role: str, count: int) -> None:
    from hf_kvcache.ops.gather_rows import triton

    fmt = Format(bits, "token", 32)
    rows = poisoned_packed(torch.randn(2, 2, 111, 64), fmt, role, 111)
    index = torch.stack([torch.randperm(111)[:count] for _ in range(4)]).view(2, 2, count)
    expected = gather_reference.gather_rows(rows, fmt, role, 64, index)
    got = triton.gather_rows(rows, fmt, role, 64, index)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scale, expected.scale) and torch.equal(got.zero, expected.zero)


@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gather_rows(bits: int, role: str) -> None:
    """Gathering packed rows and dequantizing them is dequantizing and gathering."""
    fmt = Format(bits, "token", 16)
    packed = quantize_reference.quantize_pack(torch.randn(2, 2, 70, 48), fmt, role)
    index = torch.stack([torch.randperm(70)[:33] for _ in range(4)]).view(2, 2, 33)
    got = gather_rows(packed, fmt, role, 48, index)
    whole = dequantize_reference.dequantize(packed, fmt, role, 48, 70, torch.float32)
    expected = whole.gather(2, index[..., None].expand(-1, -1, -1, 48))
    assert torch.equal(dequantize_reference.dequantize(got, fmt, role, 48, 33, torch.float32), expected)
    with pytest.raises(ValueError, match="scale per token"):
        gather_rows(packed, replace(fmt, axis="channel"), role, 48, index)


@interpreted
@pytest.mark.parametrize("rows", [1, 63, 111])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_column_sums(rows: int, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvcache.ops.column_sums import triton

    monkeypatch.setattr(triton, "MASK_ELEMENTS", 64 * 2 * rows)  # pieces of 64 queries
    query, keys = torch.randn(2, 4, 70, 64), poisoned_buffer(torch.randn(2, 2, rows, 64))
    front = torch.randn(2, 2, min(rows, 3), 64)
    visible, real = torch.rand(2, 1, 70, rows) > 0.4, torch.rand(2, 70) > 0.3
    bias = torch.randn(1, 4, 70, rows)
    extras = Extras(0.125, 4.0, torch.randn(4)) if rows == 63 else Extras(0.125)
    arguments = (
        query, keys, extras, lambda a, b: visible[:, :, a:b], lambda a, b: bias[:, :, a:b], real, reduce, front,
    )  # fmt: skip
    expected = column_sums_reference.column_sums(*arguments)
    torch.testing.assert_close(triton.column_sums(*arguments), expected, atol=1e-5, rtol=1e-4)
    plain = (query, keys, extras, lambda a, b: None)
    torch.testing.assert_close(
        triton.column_sums(*plain), column_sums_reference.column_sums(*plain), atol=1e-5, rtol=1e-4
    )


def test_split_counts() -> None:
    from hf_kvcache.ops import tuning

    entry = tuning.lookup("sm_90", 4, 80)
    assert entry == tuning.lookup("sm_90", 4, 128) and tuning.target_of(torch.device("cpu")) == "sm_90"
    assert tuning.split_count(entry, 1, 8) == 1
    assert tuning.split_count(entry, 512, 8) == entry.programs // 8
    assert tuning.split_count(entry, 512, 10**6) == 1
    assert tuning.lookup("sm_80", 2, 512) == tuning.lookup("sm_80", 2, 256)
