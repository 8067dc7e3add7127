"""Attention over packed rows by torch's int4 product, against the plain reference, on each capability of the CPU."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_kvcache.codecs import KIVI, Codec, Rotated
from hf_kvcache.ops.attention import Extras
from hf_kvcache.ops.decode_attention import cpu, decode_attention, dispatch, reference
from hf_kvcache.ops.packed import BITS, Format
from hf_kvcache.ops.quantize_pack import quantize_pack
from hf_kvcache.segments import PackedStore, Rows

needs_product = pytest.mark.skipif(cpu.native_half() is None, reason="this CPU has no fast int4 product")
# bfloat16 keeps 8 bits: errors of a product are far below this share of its spread.
TOLERANCE = 0.1
FORMATS = [
    *(Format(bits, axis, 32) for bits in BITS for axis in ("channel", "token")),
    *(Format(bits, "token", 64, "symmetric", fit="unbiased") for bits in BITS),
    Format(4, "channel", 128),
]


def near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape and ours.isfinite().all()
    assert float((ours - expected).abs().max()) <= TOLERANCE * float(expected.std())


@needs_product
@pytest.mark.parametrize("length", [1, 63, 64, 111, 257, 600])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.kind}{f.bits}-{f.axis}{f.group}")
def test_both_halves(fmt: Format, length: int) -> None:
    half = cpu.native_half()
    assert half is not None
    generator = torch.Generator().manual_seed(length)
    # Room beyond the rows that count, full of other rows.
    rows = torch.randn(2, 2, -(-(length + 40) // 128) * 128, 64, generator=generator)
    query = torch.randn(2, 2, 3, 64, generator=generator).bfloat16()
    probs = torch.softmax(torch.randn(2, 2, 3, length, generator=generator), -1)
    keys = quantize_pack(rows, fmt, "keys", half)
    near(cpu.packed_logits(query, keys, fmt, length, half), reference.packed_logits(query, keys, fmt, length, half))
    if fmt.axis == "token":
        values = quantize_pack(rows, fmt, "values", half)
        ours = cpu.packed_weighted(probs, values, fmt, 64, half)
        near(ours, reference.packed_weighted(probs, values, fmt, 64, half))


@needs_product
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", [Rotated, KIVI])
def test_a_whole_step(monkeypatch: pytest.MonkeyPatch, kind: type, bits: int, dim: int) -> None:
    codec = kind(bits, num_sink_tokens=4, residual_length=20)
    store = PackedStore(lambda keys, values: codec.for_layer(0, 1, keys, values))
    generator = torch.Generator().manual_seed(bits)
    length = 333
    keys, values = torch.randn(2, 2, 2, length, dim, generator=generator).bfloat16()
    store.append(Rows(keys + 3, values, torch.arange(length, dtype=torch.int32).expand(2, 1, length)))
    assert store.compress()
    visible = torch.rand(2, 1, 1, length, generator=generator) > 0.3
    for queries, mask in ((1, None), (1, visible), (3, None)):
        query = torch.randn(2, 6, queries, dim, generator=generator).bfloat16()
        ours, plain = both_ways(store, query, monkeypatch, mask)
        near(ours, plain)
        front, packed, tail = store.attended()
        assert front is not None and packed is not None
        assert (packed.steady is not None) == (kind is Rotated and dim % (2 * packed.half) == 0)
        step = (query, (front.keys, front.values), packed, tail, Extras(dim**-0.5), mask)
        block = decode_attention(*step, need_lse=True)  # the general way, where more is asked for
        near(block.output.float(), plain)


def both_ways(
    store: PackedStore, query: torch.Tensor, monkeypatch: pytest.MonkeyPatch, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the CPU's own functions, and by the reference."""
    front, packed, tail = store.attended()
    exact = None if front is None else (front.keys, front.values)
    extras = Extras(query.shape[-1] ** -0.5)
    ours = decode_attention(query, exact, packed, tail, extras, mask).output
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "supports", lambda *_: False)
        # A copy of the store has nothing from earlier steps.
        front, plain, tail = copy.deepcopy(store).attended()
        exact = None if front is None else (front.keys, front.values)
        return ours.float(), decode_attention(query, exact, plain, tail, extras, mask).output.float()


@needs_product
def test_what_is_kept_from_step_to_step_follows_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Rotated(4, num_sink_tokens=4, residual_length=20)
    store = PackedStore(lambda keys, values: codec.for_layer(0, 1, keys, values))
    generator = torch.Generator().manual_seed(0)

    def rows(start: int, count: int) -> Rows:
        keys, values = torch.randn(2, 2, 2, count, 64, generator=generator).bfloat16()
        index = torch.arange(start, start + count, dtype=torch.int32)
        return Rows(keys, values, index.expand(2, 1, count))

    def grow(start: int, count: int) -> None:
        for token in range(start, start + count):
            store.append(rows(token, 1))
            store.compress()

    def keep_some() -> None:
        every = store.rows
        index = torch.randperm(every.length, generator=generator)[:180].sort().values.expand(2, 2, -1)
        store.select(every, index, None, 8)
        store.compress()

    def overwrite() -> None:
        store.append(rows(500, 1))
        store.overwrite(torch.tensor([[40, 41], [42, 43]])[..., None])

    store.append(rows(0, 333))
    assert store.compress()
    changes = (
        lambda: None,
        lambda: grow(333, 40),
        lambda: store.batch_map(lambda t: t.flip(0)),
        lambda: store.crop(200, 173),
        lambda: grow(173, 70),
        keep_some,
        overwrite,
        lambda: store.expire(60, only_packed=True),
        lambda: store.batch_map(lambda t: t.repeat_interleave(2, 0)),
    )

    for change in changes:
        change()
        batch = store.shape[0]
        query = torch.randn(batch, 6, 1, 64, generator=generator).bfloat16()
        visible = (store.positions != -1)[:, :, None]
        for _ in range(2):
            ours, plain = both_ways(store, query, monkeypatch, visible)
            near(ours, plain)

    assert store.attended()[1].steady is not None


@pytest.mark.parametrize(
    "codec", [Rotated(4, residual_length=20), KIVI(4, residual_length=20)], ids=["rotated", "kivi"]
)
def test_buffers_that_were_outgrown_are_gone_before_the_next_step(codec: Codec) -> None:
    """Or the packed rows of all layers are in memory twice, from a flush until attention looks at each layer again."""

    def codes() -> int:
        gc.collect()
        every = (t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.uint8)
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in every}.values())

    others = codes()
    store = PackedStore(lambda keys, values: codec.for_layer(0, 1, keys, values))
    sizes = []
    for token in range(330):
        index = torch.full((1, 1, 1), token, dtype=torch.int32)
        store.append(Rows(*torch.randn(2, 1, 2, 1, 64).bfloat16(), index))
        store.attended()
        if store.compress():
            held = sum(t.nbytes for side in store._sides() for t in side.tensors().values() if t.dtype == torch.uint8)
            sizes.append(held)
            assert codes() - others == held
    assert len(set(sizes)) > 2, "buffers grew"


def test_a_step_that_needs_gradients_is_differentiated() -> None:
    fmt = Format(4, "token", 64, "symmetric", fit="unbiased")
    rows = torch.randn(1, 1, 64, 64)
    query = torch.randn(1, 1, 2, 64).bfloat16().requires_grad_()
    half = cpu.native_half() or 32
    dispatch.packed_logits(query, quantize_pack(rows, fmt, "keys", half), fmt, 64, half).sum().backward()
    assert query.grad is not None and bool(query.grad.any())


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_capabilities(capability: str) -> None:
    """The layout follows what torch says of the CPU when it starts."""
    if os.environ.get("ATEN_CPU_CAPABILITY"):
        pytest.skip("already one of them")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout[-2000:]
