"""Column sums of an attention matrix on the GPU, in two passes over the keys and without the matrix.

The first kernel finds the maximum and the sum of exponentials of every query, the second adds up each row's share of
them. Queries are taken in pieces only because their mask is made in pieces.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..attention.reference import Extras

MASK_ELEMENTS = 1 << 27  # of one piece of the mask
HIDDEN = tl.constexpr(-3.0e38)


@triton.jit
def _logits(
    q, keys, k_n, front, f_n, mask, m_q, m_n, bias, b_q, b_n, query, n, queries, rows, front_rows, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, FRONT: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Logits `[queries, rows]` in powers of two; rows beyond the last are -inf."""
    d = tl.arange(0, DP)
    x = tl.load(q + query[:, None] * D + d[None, :], mask=(query < queries)[:, None] & (d < D)[None, :], other=0.0)
    here = (n < rows)[None, :] & (d < D)[:, None]
    k = tl.load(keys + n[None, :] * k_n + d[:, None], mask=here, other=0.0)
    if FRONT:
        first = tl.load(front + n[None, :] * f_n + d[:, None], mask=here & (n < front_rows)[None, :], other=0.0)
        k = tl.where((n < front_rows)[None, :], first, k)
    s = tl.dot(x.to(k.dtype), k, input_precision="ieee") * scale
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.8853900817779268 / softcap)) + 1.0))
    inside = (query < queries)[:, None] & (n < rows)[None, :]
    if BIAS:
        s += tl.load(bias + query[:, None] * b_q + n[None, :] * b_n, mask=inside, other=0.0).to(tl.float32)
    s *= 1.4426950408889634
    if MASK:
        s = tl.where(tl.load(mask + query[:, None] * m_q + n[None, :] * m_n, mask=inside, other=1) != 0, s, HIDDEN)
    return tl.where((n < rows)[None, :], s, float("-inf"))


# Numbers that change from prompt to prompt must not pick another variant of a kernel.
_CHANGING = ["queries", "rows", "front_rows", "m_b", "m_h", "m_q", "b_b", "b_h", "b_q"]


@triton.jit(do_not_specialize=_CHANGING)
def _normalizer_kernel(
    q, keys, k_b, k_h, k_n, front, f_b, f_h, f_n, mask, m_b, m_h, m_q, m_n, bias, b_b, b_h, b_q, b_n, sinks,
    top_out, sum_out, heads, group, queries, rows, front_rows, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, FRONT: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Maximum and 1 / sum of exponentials for BLOCK_Q queries of one query head. Grid: (query blocks, B * Hq)."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // (heads * group)
    hq = bh % (heads * group)
    h = hq // group
    query = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    if SINKS:
        top = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks + hq).to(tl.float32) * 1.4426950408889634
        total += 1.0
    for start in tl.range(0, rows, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        s = _logits(
            q + bh * queries * D, keys + b * k_b + h * k_h, k_n, front + b * f_b + h * f_h, f_n,
            mask + b * m_b + h * m_h, m_q, m_n, bias + b * b_b + hq * b_h, b_q, b_n, query, n, queries, rows,
            front_rows, scale, softcap, D, DP, FRONT, SOFTCAP, MASK, BIAS,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(s - new_top[:, None]), 1)
        top = new_top
    tl.store(top_out + bh * queries + query, top, mask=query < queries)
    tl.store(sum_out + bh * queries + query, 1.0 / total, mask=query < queries)


@triton.jit(do_not_specialize=[*_CHANGING, "r_b"])
def _columns_kernel(
    q, keys, k_b, k_h, k_n, front, f_b, f_h, f_n, mask, m_b, m_h, m_q, m_n, bias, b_b, b_h, b_q, b_n, real, r_b,
    top_in, sum_in, out, heads, group, queries, rows, front_rows, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, FRONT: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, REAL: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """Adds to BLOCK_N columns of one KV head what all queries pay to them. Grid: (column blocks, B * Hk)."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // heads
    h = bh % heads
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, queries, BLOCK_Q):
        query = start + tl.arange(0, BLOCK_Q)
        share = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
        for g in tl.range(0, group):
            hq = h * group + g
            row = b * heads * group + hq
            s = _logits(
                q + row * queries * D, keys + b * k_b + h * k_h, k_n, front + b * f_b + h * f_h, f_n,
                mask + b * m_b + h * m_h, m_q, m_n, bias + b * b_b + hq * b_h, b_q, b_n, query, n, queries, rows,
                front_rows, scale, softcap, D, DP, FRONT, SOFTCAP, MASK, BIAS,
            )  # fmt: skip
            top = tl.load(top_in + row * queries + query, mask=query < queries, other=0.0)
            inverse = tl.load(sum_in + row * queries + query, mask=query < queries, other=0.0)
            p = tl.exp2(s - top[:, None]) * inverse[:, None]
            share = tl.maximum(share, p) if MAXIMUM else share + p
        counts = query < queries
        if REAL:
            counts = tl.load(real + b * r_b + query, mask=counts, other=0) != 0
        total += tl.sum(tl.where(counts[:, None], share, 0.0), 0)
    if not MAXIMUM:
        total /= group
    at = out + bh * rows + n
    tl.store(at, tl.load(at, mask=n < rows, other=0.0) + total, mask=n < rows)


def _strides(tensor: torch.Tensor | None) -> list[int]:
    if tensor is None:
        return [0] * 4
    return [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]


def column_sums(
    query: torch.Tensor,  # [B, Hq, Q, D]
    keys: torch.Tensor,  # [B, Hk, S, D]
    extras: Extras,
    visible: Callable[[int, int], torch.Tensor | None],
    bias: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
    real: torch.Tensor | None = None,
    reduce: str = "mean",
    front: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.column_sums`."""
    b, hq, q_len, d = query.shape
    hk, s = keys.shape[1], keys.shape[2]
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    device = query.device
    total = torch.zeros(b, hk, s, dtype=torch.float32, device=device)
    first = keys if front is None else front.contiguous()
    piece = max(64, MASK_ELEMENTS // max(1, b * s))
    dp = max(16, triton.next_power_of_2(d))
    for start in range(0, q_len, piece):
        stop = min(start + piece, q_len)
        q = query[:, :, start:stop].contiguous()
        n = stop - start
        seen, added = visible(start, stop), bias(start, stop)
        if added is not None and added.shape[1] not in (1, hq):
            added = added.repeat_interleave(hq // added.shape[1], dim=1)
        mask = total if seen is None else seen.view(torch.uint8)
        top = torch.empty(b, hq, n, dtype=torch.float32, device=device)
        inverse = torch.empty_like(top)
        counts = None if real is None else real[:, start:stop].contiguous().view(torch.uint8)
        operands = (
            q, keys, *keys.stride()[:3], first, *first.stride()[:3], mask, *_strides(None if seen is None else mask),
            total if added is None else added, *_strides(added),
        )  # fmt: skip
        numbers = (
            hk, hq // hk, n, s, 0 if front is None else front.shape[2], float(extras.scaling),
            float(extras.softcap or 1.0),
        )  # fmt: skip
        static = dict(
            D=d, DP=dp, BLOCK_Q=32, BLOCK_N=64, FRONT=front is not None, SOFTCAP=extras.softcap is not None,
            MASK=seen is not None, BIAS=added is not None, num_warps=4,
        )  # fmt: skip
        _normalizer_kernel[(-(-n // 32), b * hq)](
            *operands, total if extras.sinks is None else extras.sinks, top, inverse, *numbers,
            SINKS=extras.sinks is not None, **static,
        )  # fmt: skip
        _columns_kernel[(-(-s // 64), b * hk)](
            *operands, total if counts is None else counts, 0 if counts is None else counts.stride(0), top, inverse,
            total, *numbers, REAL=counts is not None, MAXIMUM=reduce == "max", **static,
        )  # fmt: skip
    return total
