"""The operations against dense float64, on awkward lengths and over memory poisoned with NaN."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache.ops.attention import Extras, attend, merge
from hf_kvcache.ops.column_sums import column_sums, reference
from hf_kvcache.ops.decode_attention import reference as packed_reference
from hf_kvcache.ops.dequantize.reference import dequantize
from hf_kvcache.ops.packed import Format
from hf_kvcache.ops.quantize_pack.reference import quantize_pack
from hf_kvcache.segments import DenseSegment, Rows, capacity_for

B, HK, G, D = 2, 2, 3, 8


def dense(q, k, v, scale, visible, softcap=None, sinks=None, bias=None):
    """Output and probabilities by definition, in float64, with keys repeated for each query head."""
    q, k, v = q.double(), k.double().repeat_interleave(G, 1), v.double().repeat_interleave(G, 1)
    logits = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.double()
    if visible is not None:
        wide = visible.repeat_interleave(G, 1) if visible.shape[1] == HK else visible
        logits = logits.masked_fill(~wide, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        probs = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    else:
        probs = torch.softmax(logits, -1)
    return probs @ v, probs


def poisoned(*shape: int) -> torch.Tensor:
    """Rows in the middle of a buffer whose other rows are NaN."""
    buffer = torch.full((*shape[:2], shape[2] + 9, shape[3]), float("nan"))
    buffer[:, :, : shape[2]] = torch.randn(*shape)
    return buffer[:, :, : shape[2]]


CASES = {
    "plain": dict(),
    "softcap": dict(softcap=5.0),
    "sinks": dict(sinks=torch.linspace(-1, 2, HK * G)),
    "bias": dict(bias=True),
    "all": dict(softcap=5.0, sinks=torch.linspace(-1, 2, HK * G), bias=True),
}


@pytest.mark.parametrize("rows", [1, 63, 64, 111, 257])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", ["none", "shared", "by head"])
def test_attend_and_merge(rows: int, queries: int, case: str, masked: str) -> None:
    torch.manual_seed(rows)
    q, k, v = torch.randn(B, HK * G, queries, D), poisoned(B, HK, rows, D), poisoned(B, HK, rows, 6)
    options = dict(CASES[case])
    if options.get("bias"):
        options["bias"] = torch.randn(1, HK * G, queries, rows)
    visible = None
    if masked != "none":
        visible = torch.rand(B, 1 if masked == "shared" else HK, queries, rows) > 0.4
        visible[..., 0] = True
    expected, expected_probs = dense(q, k, v, 0.4, visible, **options)
    extras = Extras(0.4, options.get("softcap"), options.get("sinks"))
    block = attend(q, k, v, extras, visible, options.get("bias"), need_probs=True)
    torch.testing.assert_close(block.output.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(block.probs.double(), expected_probs, atol=1e-5, rtol=1e-4)

    # The same rows as three segments, one of them invisible to some queries.
    cuts = sorted({0, rows // 3, rows // 2, rows})
    alone = extras._replace(sinks=None)
    blocks = [
        attend(
            q,
            k[:, :, a:b],
            v[:, :, a:b],
            alone,
            None if visible is None else visible[..., a:b],
            None if options.get("bias") is None else options["bias"][..., a:b],
            need_lse=True,
        )
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    torch.testing.assert_close(merge(blocks, extras.sinks).double(), expected, atol=2e-5, rtol=1e-4)


def test_a_fully_masked_query_is_finite() -> None:
    q, k, v = torch.randn(1, 2, 1, D), torch.randn(1, 2, 5, D), torch.randn(1, 2, 5, D)
    hidden = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    block = attend(q, k, v, Extras(1.0), hidden, need_lse=True)
    assert block.lse is not None and block.output.isfinite().all() and block.lse.isfinite().all()
    seen = attend(q, k, v, Extras(1.0), need_lse=True)
    torch.testing.assert_close(merge([block, seen]), seen.output)


@pytest.mark.parametrize("rows", [1, 63, 111])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("piece", [1, 40, 1 << 22])
def test_column_sums(rows: int, reduce: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PIECE_ELEMENTS", piece)
    torch.manual_seed(rows)
    q, k, v = torch.randn(B, HK * G, rows, D), poisoned(B, HK, rows, D), torch.randn(B, HK, rows, D)
    causal = torch.ones(1, 1, rows, rows, dtype=torch.bool).tril()
    real = torch.ones(B, rows, dtype=torch.bool)
    real[0, : rows // 2] = False
    _, probs = dense(q, k, v, 0.4, causal)
    grouped = probs.view(B, HK, G, rows, rows)
    grouped = grouped.mean(2) if reduce == "mean" else grouped.amax(2)
    expected = (grouped * real[:, None, :, None]).sum(2)
    got = column_sums(q, k, Extras(0.4), lambda a, b: causal[..., a:b, :], real=real, reduce=reduce)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_column_sums_never_makes_the_full_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PIECE_ELEMENTS", 4096)
    largest = 0
    original = reference.probabilities

    def watch(logits, extras):
        nonlocal largest
        largest = max(largest, logits.numel())
        return original(logits, extras)

    monkeypatch.setattr(reference, "probabilities", watch)
    q, k = torch.randn(1, 4, 300, D), torch.randn(1, 2, 300, D)
    column_sums(q, k, Extras(1.0), lambda a, b: None)
    assert 0 < largest <= max(4096, 4 * 300)


def table(rows: int, scores: bool = True, batch: int = 2) -> Rows:
    return Rows(
        torch.randn(batch, HK, rows, D),
        torch.randn(batch, HK, rows, D),
        torch.arange(rows, dtype=torch.int32).expand(batch, 1, rows),
        torch.rand(batch, HK, rows) if scores else None,
    )


def test_a_segment_grows_in_place_with_bounded_slack() -> None:
    torch.manual_seed(0)
    segment, parts = DenseSegment(), []
    buffers = set()
    for step in [1500, *[1] * 600]:
        part = table(step)
        part.positions = part.positions + sum(p.length for p in parts)
        parts.append(part)
        segment.append(part)
        buffers.add(segment.rows.keys.untyped_storage().data_ptr())
        per_row = 2 * (HK * D * 2 * 4 + 4 + HK * 4)
        assert segment.nbytes <= 1.25 * per_row * segment.length
    assert len(buffers) < 15, "the buffer is not grown in amortized steps"
    for name in ("keys", "values", "positions", "scores"):
        whole = torch.cat([p.tensors()[name] for p in parts], dim=2)
        assert torch.equal(segment.rows.tensors()[name], whole), name


@pytest.mark.parametrize("rows", [0, 1, 100, 5000])
def test_capacity_leaves_room(rows: int) -> None:
    assert rows < capacity_for(rows) <= max(rows + 32, int(rows * 1.07) + 1)


def test_overwrite_moves_the_whole_row() -> None:
    torch.manual_seed(0)
    segment = DenseSegment()
    rows = table(6)
    segment.append(rows)
    segment.widen_positions()
    slot = torch.tensor([[[0], [3]], [[2], [5]]])
    before = {name: tensor.clone() for name, tensor in segment.rows.tensors().items()}
    segment.overwrite(slot)
    assert segment.length == 5
    for name, tensor in segment.rows.tensors().items():
        for b in range(2):
            for h in range(HK):
                expected = before[name][b, h].clone()
                expected[slot[b, h, 0]] = before[name][b, h, 5]
                assert torch.equal(tensor[b, h], expected[:5]), (name, b, h)


@pytest.mark.parametrize("group", [32, 40, 96])
def test_pages_hold_whole_groups_of_tokens(group):
    """Beyond one page, where a group does not divide it."""
    torch.manual_seed(0)
    fmt = Format(4, "channel", group)
    length = 2500 // group * group
    rows, query = torch.randn(1, 1, length, 16), torch.randn(1, 1, 3, 16)
    packed = quantize_pack(rows, fmt, "keys", 32)
    decoded = dequantize(packed, fmt, "keys", 16, length, torch.float32)
    ours = packed_reference.packed_logits(query, packed, fmt, length, 32)
    assert torch.allclose(ours, query @ decoded.transpose(-1, -2), atol=1e-4)
