"""Decode attention over latents as Triton kernels: one shared key and value for all query heads.

One kernel for exact rows and one for packed ones give every program a slice of the rows (a split) and up to `BLOCK_M`
query rows; a last one merges the splits of all parts. A latent is loaded once and used twice, as key and (transposed)
as value. Codes become float16 numbers, in which every level up to 8 bits is exact, and are never scaled: one scale of
each row multiplies logits and probabilities. Nothing here waits for the device.
"""
# mypy: ignore-errors

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..attention import Block, Extras
from ..decode_attention import PackedRows
from ..decode_attention.triton import Launch
from ..packed import Format, value_half

if TYPE_CHECKING:
    from .dispatch import Part

TILE = 64  # tokens of a packed tile
LOG2E = math.log2(math.e)
# Probabilities times a scale would underflow in float16 far from the maximum; 2**6 leaves room for scales up to 1,000.
LIFT = tl.constexpr(64.0)
HIDDEN = tl.constexpr(-3.0e38)  # logit of an invisible row: finite, so that a fully masked query stays finite


class Config(NamedTuple):
    """How a kernel is started."""

    block_m: int  # query rows of a program
    block_n: int  # exact rows of one step
    num_warps: int
    num_stages: int
    programs: int = 264  # to aim for on the whole GPU
    max_splits: int = 64


def config_of(rows: int, rank: int, size: int, packed: bool) -> Config:
    """For `rows` query rows, latents of `rank` numbers of `size` bytes. From registers and shared memory, not timed."""
    block_n = 32 if rank > 256 else 64
    if packed:
        return Config(16, block_n, 8, 1)
    if size == 4:
        return Config(16, 16, 8, 1)
    return Config(16, block_n, 4, 2) if rows <= 16 else Config(32, block_n, 8, 2)


@triton.jit
def _finished(
    s, column, live, rows_in, query, bias_row, softcap, mask, mask_n, bias, bias_n,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Logits `[queries, tokens]` in powers of two, capped, biased and masked."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        e = tl.exp2(s * (2.8853900817779268 / softcap))
        s = softcap * 1.4426950408889634 * (1.0 - 2.0 / (e + 1.0))
    inside = rows_in[:, None] & live[None, :]
    if BIAS:
        added = tl.load(bias + bias_row[:, None] + column[None, :] * bias_n, mask=inside, other=0.0)
        s += 1.4426950408889634 * added.to(tl.float32)
    if MASK:
        seen = tl.load(mask + query[:, None] + column[None, :] * mask_n, mask=inside, other=0)
        s = tl.where(seen != 0, s, HIDDEN)
    return tl.where(live[None, :], tl.maximum(s, HIDDEN), float("-inf"))


_CHANGING = ["rows", "q_len", "length", "first_column", "first_split", "splits", "all_splits"]
_CHANGING += ["mask_b", "mask_q", "bias_b", "bias_h", "bias_q"]
_CHANGING_PACKED = [*_CHANGING, "zero"]


@triton.jit(do_not_specialize=_CHANGING)
def exact_kernel(
    q_latent, q_rope, q_scale, softcap,
    latent, latent_b, latent_n, rope, rope_b, rope_n,
    mask, mask_b, mask_q, mask_n, bias, bias_b, bias_h, bias_q, bias_n,
    out, lse, rows, q_len, length, first_column, first_split, splits, all_splits,
    R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of exact rows. Grid: (splits * chunks of BLOCK_M query rows, batch)."""
    chunks = (rows + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(0) // chunks
    b = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) % chunks * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_in = m < rows
    n, r, p = tl.arange(0, BLOCK_N), tl.arange(0, RP), tl.arange(0, PP)
    kind = latent.dtype.element_ty
    at = (b * rows + m)[:, None]
    q = tl.load(q_latent + at * R + r[None, :], mask=rows_in[:, None] & (r < R)[None, :], other=0.0).to(kind)
    qr = tl.load(q_rope + at * P + p[None, :], mask=rows_in[:, None] & (p < P)[None, :], other=0.0).to(kind)
    query = b * mask_b + (m % q_len) * mask_q
    bias_row = b * bias_b + (m // q_len) * bias_h + (m % q_len) * bias_q
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RP], tl.float32)
    blocks = (length + BLOCK_N - 1) // BLOCK_N
    per_split = (blocks + splits - 1) // splits
    for block in tl.range(split * per_split, tl.minimum(split * per_split + per_split, blocks), num_stages=STAGES):
        token = block * BLOCK_N + n
        live = token < length
        c = tl.load(
            latent + b * latent_b + token[:, None] * latent_n + r[None, :],
            mask=live[:, None] & (r < R)[None, :],
            other=0.0,
        )
        k = tl.load(
            rope + b * rope_b + token[:, None] * rope_n + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0.0
        ).to(kind)
        s = tl.dot(q, tl.trans(c), input_precision="ieee")
        s = tl.dot(qr, tl.trans(k), s, input_precision="ieee") * q_scale
        s = _finished(
            s, first_column + token, live, rows_in, query, bias_row, softcap, mask, mask_n, bias, bias_n,
            SOFTCAP, MASK, BIAS,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - new_top)
        top = new_top
        weight = tl.exp2(s - top[:, None])
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(kind), c, acc * fade[:, None], input_precision="ieee")
    _store(out, lse, acc, total, 1.0, top, b, m, r, rows_in, rows, first_split + split, all_splits, R)


@triton.jit
def _store(out, lse, acc, total, lift, top, b, m, r, rows_in, rows, split, all_splits, R: tl.constexpr):
    factor = tl.where(total > 0, 1.0 / (total * lift), 0.0)
    row = (b * all_splits + split) * rows + m
    tl.store(out + row[:, None] * R + r[None, :], acc * factor[:, None], mask=rows_in[:, None] & (r < R)[None, :])
    tl.store(lse + row, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=rows_in)


@triton.jit
def _queries(q_latent, b_row, r, rows_in, q_scale, R: tl.constexpr):
    """Channels `r` of the queries, scaled, as float16 `[queries, channels]`."""
    inside = rows_in[:, None] & (r < R)[None, :]
    return (tl.load(q_latent + b_row[:, None] * R + r[None, :], mask=inside, other=0.0) * q_scale).to(tl.float16)


@triton.jit
def _latent_numbers(at, r, i, half, R: tl.constexpr, BITS: tl.constexpr):
    """Channels `r` of the latents of 32 tokens as `[channels, tokens]`: levels around zero, without their scale."""
    inside = (r < R)[:, None] & (i < 32)[None, :]
    code = (tl.load(at + r[:, None] * 32 + i[None, :], mask=inside, other=0) >> (4 * half)) & 15
    if BITS == 8:
        high = (tl.load(at + (R + r)[:, None] * 32 + i[None, :], mask=inside, other=0) >> (4 * half)) & 15
        code = code | (high << 4)
    return code.to(tl.float16) - (2**BITS - 1) / 2


@triton.jit
def _rope_products(q_rope, at, i, w, b_row, rows_in, half, P: tl.constexpr, V: tl.constexpr,
                   BITS: tl.constexpr, block_stride, scale, BLOCK_M: tl.constexpr):  # fmt: skip
    """Products of rotary queries with the rotary parts of 32 tokens, without their scale: `[queries, tokens]`."""
    s = tl.zeros([BLOCK_M, 32], tl.float32)
    for block in tl.static_range(P // (2 * V)):
        row = at + block * block_stride + (32 * half + i)[:, None] * V + w[None, :]
        low = tl.load(row)
        if BITS == 8:
            high = tl.load(row + 64 * V)
        for part in tl.static_range(2):
            code = (low >> (4 * part)) & 15
            if BITS == 8:
                code = code | (((high >> (4 * part)) & 15) << 4)
            numbers = code.to(tl.float16) - (2**BITS - 1) / 2  # [tokens, V]
            first = (2 * block + part) * V
            q = tl.load(q_rope + b_row[:, None] * P + first + w[None, :], mask=rows_in[:, None], other=0.0)
            s = tl.dot((q * scale).to(tl.float16), tl.trans(numbers), s)
    return s


@triton.jit(do_not_specialize=_CHANGING_PACKED)
def packed_kernel(
    q_latent, q_rope, constant, q_scale, softcap,
    codes, codes_b, codes_t, scale, scale_b,
    rope, rope_b, rope_block, rope_t, rope_scale, rope_scale_b,
    mask, mask_b, mask_q, mask_n, bias, bias_b, bias_h, bias_q, bias_n,
    out, lse, rows, q_len, length, first_column, first_split, splits, all_splits, zero,
    R: tl.constexpr, RC: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr, ROPE_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, CONSTANT: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of packed rows, a tile of 64 tokens in halves of 32. Grid as for exact rows."""
    chunks = (rows + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(0) // chunks
    b = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) % chunks * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_in = m < rows
    i, r, w = tl.arange(0, 32), tl.arange(0, RC), tl.arange(0, V)
    b_row = b * rows + m
    # Channels come in chunks, so that their codes as numbers do not fill the registers.
    CHUNKS: tl.constexpr = (R + RC - 1) // RC
    q, acc = (), ()
    for n in tl.static_range(CHUNKS):
        q = q + (_queries(q_latent, b_row, n * RC + r, rows_in, q_scale, R),)
        acc = acc + (tl.zeros([BLOCK_M, RC], tl.float32),)
    extra = tl.zeros([BLOCK_M], tl.float32)
    if CONSTANT:
        extra += tl.load(constant + b_row, mask=rows_in, other=0.0) * q_scale
    query = b * mask_b + (m % q_len) * mask_q
    bias_row = b * bias_b + (m // q_len) * bias_h + (m % q_len) * bias_q
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    tiles = (length + 63) // 64
    per_split = (tiles + splits - 1) // splits
    stop = tl.minimum(split * per_split + per_split, tiles)
    for step in tl.range(2 * split * per_split, 2 * stop, num_stages=STAGES):
        tile, half = step // 2, step % 2
        at = codes + b * codes_b + tile * codes_t
        rope_at = rope + b * rope_b + tile * rope_t
        token = step * 32 + i
        live = token < length
        one = tl.load(scale + b * scale_b + token, mask=live, other=0.0).to(tl.float32)
        two = tl.load(rope_scale + b * rope_scale_b + token, mask=live, other=0.0).to(tl.float32)
        s = tl.zeros([BLOCK_M, 32], tl.float32)
        for n in tl.static_range(CHUNKS):
            x = q[n]
            if BITS == 8:
                # Two planes of codes leave no registers for the queries: they are read again. The compiler, which
                # would rather keep them, does not know that `zero` is one.
                x = _queries(q_latent + tile * zero, b_row, n * RC + r, rows_in, q_scale, R)
            s = tl.dot(x, _latent_numbers(at, n * RC + r, i, half, R, BITS), s)
        s *= one[None, :]
        s += two[None, :] * _rope_products(
            q_rope, rope_at, i, w, b_row, rows_in, half, P, V, ROPE_BITS, rope_block, q_scale, BLOCK_M
        )
        s = _finished(
            s + extra[:, None], first_column + token, live, rows_in, query, bias_row, softcap, mask, mask_n, bias,
            bias_n, SOFTCAP, MASK, BIAS,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - new_top)
        # The first half of a tile always holds a token; a second half may hold none, and changes nothing then.
        top = new_top
        weight = tl.exp2(s - top[:, None])
        total = total * fade + tl.sum(weight, 1)
        weight = (weight * one[None, :] * LIFT).to(tl.float16)
        grown = ()
        for n in tl.static_range(CHUNKS):
            numbers = _latent_numbers(at, n * RC + r, i, half, R, BITS)
            grown = grown + (tl.dot(weight, tl.trans(numbers), acc[n] * fade[:, None]),)
        acc = grown
    for n in tl.static_range(CHUNKS):
        _store(out, lse, acc[n], total, LIFT, top, b, m, n * RC + r, rows_in, rows, first_split + split, all_splits, R)


@triton.jit(do_not_specialize=["rows", "q_len", "packed_first", "packed_stop", "splits"])
def merge_kernel(
    parts, lse, sinks, out, out_packed, share, out_lse, rows, q_len, packed_first, packed_stop, splits,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, ALL_S: tl.constexpr,
    SINKS: tl.constexpr, APART: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One query row: the weighted sum of its splits; packed ones apart, in the coordinates they were coded in."""
    row = tl.program_id(0)
    b = (row // rows).to(tl.int64)
    m = row % rows
    every = tl.arange(0, ALL_S)
    logs = tl.load(lse + (b * splits + every) * rows + m, mask=every < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + m // q_len).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logs - top)
    weight = tl.sum(weights, 0)
    if SINKS:
        weight += tl.exp2(sink - top)
    inverse = tl.where(weight > 0, 1.0 / weight, 0.0)
    d = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    packed = tl.zeros([BLOCK_R], tl.float32)
    exact = tl.zeros([BLOCK_R], tl.float32)
    for start in tl.range(0, splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        one = tl.load(lse + (b * splits + s) * rows + m, mask=s < splits, other=float("-inf"))
        x = tl.load(
            parts + ((b * splits + s) * rows + m)[:, None] * R + d[None, :],
            mask=(s < splits)[:, None] & (d < R)[None, :],
            other=0.0,
        )
        x = tl.exp2(one - top)[:, None] * x
        if APART:
            mine = ((s >= packed_first) & (s < packed_stop))[:, None]
            packed += tl.sum(tl.where(mine, x, 0.0), 0)
            exact += tl.sum(tl.where(mine, 0.0, x), 0)
        else:
            exact += tl.sum(x, 0)
    at = (b * rows + m) * R + d
    tl.store(out + at, (exact * inverse).to(out.dtype.element_ty), mask=d < R)
    if APART:
        tl.store(out_packed + at, packed * inverse, mask=d < R)
    if tl.program_id(1) == 0:
        if APART:
            mine = (every >= packed_first) & (every < packed_stop)
            tl.store(share + b * rows + m, tl.sum(tl.where(mine, weights, 0.0), 0) * inverse)
        if LSE:
            natural = tl.where(weight > 0, (top + tl.log2(weight)) * 0.6931471805599453, float("-inf"))
            tl.store(out_lse + b * rows + m, natural)


def _fits(fmt: Format, dim: int) -> bool:
    return fmt.kind == "symmetric" and fmt.axis == "token" and fmt.group == dim and fmt.bits in (4, 8)


def supports(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    parts: Sequence[Part],
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    need_probs: bool = False,
    need_lse: bool = False,
) -> bool:
    """Whether `latent_attention` takes this step (else: by pages). Devices are the dispatcher's business."""
    rank, size = q_latent.shape[-1], q_rope.shape[-1]
    if need_probs or extras.dropout > 0 or not 16 <= rank <= 512 or size > 128 or q_latent.shape[2] > 16:
        return False
    if q_latent.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    if sum(isinstance(part, PackedRows) for part in parts) > 1:
        return False
    for part in parts:
        if isinstance(part, PackedRows):
            fits = _fits(part.key_format, rank) and _fits(part.value_format, size)
            if not fits or part.half != 32 or size % 32 or value_half(size, 32) < 16:
                return False
    return True


def _rows_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides of dimensions of size 1 as 0, so that they do not pick another variant of the kernel."""
    return [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]


def plan(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    parts: Sequence[Part],
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    need_lse: bool = False,
    config: Config | None = None,
) -> tuple[list[Launch], dict[str, torch.Tensor | None]]:
    """The launches of one step and the tensors they fill."""
    b, h, q_len, rank = q_latent.shape
    size, rows, device = q_rope.shape[3], h * q_len, q_latent.device
    ql, qr = (x.flatten(1, 2).contiguous() for x in (q_latent, q_rope))
    size_of = q_latent.element_size()
    configs = [config or config_of(rows, rank, size_of, isinstance(part, PackedRows)) for part in parts]
    lengths = [part.length if isinstance(part, PackedRows) else part[0].shape[2] for part in parts]
    total = sum(lengths)
    counts = []
    for part, length, own in zip(parts, lengths, configs, strict=True):
        blocks = -(-length // (TILE if isinstance(part, PackedRows) else own.block_n))
        wanted = -(-own.programs // (b * -(-rows // own.block_m)))
        counts.append(max(1, min(wanted, blocks // 2, own.max_splits)) if length else 0)
    splits = sum(counts)
    partial = torch.empty(b, splits, rows, rank, dtype=torch.float32, device=device)
    part_lse = torch.empty(b, splits, rows, dtype=torch.float32, device=device)
    mask = part_lse if visible is None else visible.expand(b, 1, q_len, total).view(torch.uint8)
    extra = part_lse if bias is None else bias.expand(b, h, q_len, total)
    ms = [0] * 4 if visible is None else _strides(mask)
    es = [0] * 4 if bias is None else _strides(extra)
    common: dict[str, Any] = dict(
        q_scale=float(extras.scaling * (LOG2E if extras.softcap is None else 1.0)),
        softcap=float(extras.softcap or 1.0),
        mask=mask, mask_b=ms[0], mask_q=ms[2], mask_n=ms[3],
        bias=extra, bias_b=es[0], bias_h=es[1], bias_q=es[2], bias_n=es[3],
        out=partial, lse=part_lse, rows=rows, q_len=q_len, all_splits=splits,
        R=rank, P=size, SOFTCAP=extras.softcap is not None, MASK=visible is not None, BIAS=bias is not None,
    )  # fmt: skip
    launches, column, split = [], 0, 0
    packed_first = packed_stop = 0
    for part, length, count, own in zip(parts, lengths, counts, configs, strict=True):
        if not length:
            continue
        grid = (count * -(-rows // own.block_m), b)
        options = dict(num_warps=own.num_warps, num_stages=own.num_stages)
        args = common | dict(
            length=length, first_column=column, first_split=split, splits=count, BLOCK_M=own.block_m,
            STAGES=own.num_stages,
        )  # fmt: skip
        if isinstance(part, PackedRows):
            packed_first, packed_stop = split, split + count
            launches.append(Launch(packed_kernel, grid, args | _packed_arguments(part, ql, qr), options))
        else:
            latent, rope = (_rows_last(x) for x in part)
            ls, rs = _strides(latent), _strides(rope)
            args |= dict(
                q_latent=ql, q_rope=qr, latent=latent, latent_b=ls[0], latent_n=ls[2],
                rope=rope, rope_b=rs[0], rope_n=rs[2],
                RP=max(16, triton.next_power_of_2(rank)), PP=max(16, triton.next_power_of_2(size)),
                BLOCK_N=own.block_n,
            )  # fmt: skip
            launches.append(Launch(exact_kernel, grid, args, options))
        column, split = column + length, split + count
    apart = packed_stop > packed_first
    output = torch.empty(b, h, q_len, rank, dtype=torch.float32 if apart else q_latent.dtype, device=device)
    packed = torch.empty(b, rows, rank, dtype=torch.float32, device=device) if apart else None
    share = torch.empty(b, rows, dtype=torch.float32, device=device) if apart else None
    lse = torch.empty(b, h, q_len, dtype=torch.float32, device=device) if need_lse else None
    block_r = min(128, max(16, triton.next_power_of_2(rank)))
    merged = dict(
        parts=partial, lse=part_lse, sinks=part_lse if extras.sinks is None else extras.sinks, out=output,
        out_packed=partial if packed is None else packed, share=part_lse if share is None else share,
        out_lse=part_lse if lse is None else lse, rows=rows, q_len=q_len,
        packed_first=packed_first, packed_stop=packed_stop, splits=splits,
        R=rank, BLOCK_R=block_r, BLOCK_S=16, ALL_S=max(16, triton.next_power_of_2(splits)),
        SINKS=extras.sinks is not None, APART=apart, LSE=need_lse,
    )  # fmt: skip
    grid = (b * rows, -(-rank // block_r))
    launches.append(Launch(merge_kernel, grid, merged, dict(num_warps=4, num_stages=1)))
    return launches, dict(output=output, packed=packed, share=share, lse=lse)


def _packed_arguments(part: PackedRows, ql: torch.Tensor, qr: torch.Tensor) -> dict[str, Any]:
    """Codes, scales, and queries in the coordinates of the codes."""
    turned = ql.float() if part.key_turn is None else torch.matmul(ql.float(), part.key_turn.float())
    rope = qr.float() if part.value_turn is None else torch.matmul(qr.float(), part.value_turn.float())
    constant = turned
    if part.key_mean is not None:
        constant = torch.matmul(ql.float(), part.key_mean[:, 0, :, None].float()).contiguous()
    scale, rope_scale = part.keys.scale[:, 0, :, 0].half(), part.values.scale[:, 0, :, 0].half()
    # The scale of a token lies right behind that of the one before it.
    scale, rope_scale = (x if x.stride(1) == 1 else x.contiguous() for x in (scale, rope_scale))
    cs, vs = _strides(part.keys.codes), _strides(part.values.codes)
    return dict(
        q_latent=turned.contiguous(), q_rope=rope.contiguous(), constant=constant,
        codes=part.keys.codes, codes_b=cs[0], codes_t=cs[2], scale=scale, scale_b=scale.stride(0),
        rope=part.values.codes, rope_b=vs[0], rope_block=vs[2], rope_t=vs[3],
        rope_scale=rope_scale, rope_scale_b=rope_scale.stride(0),
        RC=min(512 // part.key_format.bits, max(16, triton.next_power_of_2(ql.shape[-1]))),
        V=value_half(qr.shape[-1], 32),
        BITS=part.key_format.bits, ROPE_BITS=part.value_format.bits,
        CONSTANT=part.key_mean is not None, zero=0,
    )  # fmt: skip


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    parts: Sequence[Part],
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    need_probs: bool = False,
    need_lse: bool = False,
    config: Config | None = None,
) -> Block:
    """See `reference.latent_attention`."""
    assert not need_probs, "probabilities are never formed here"
    launches, made = plan(q_latent, q_rope, parts, extras, visible, bias, need_lse, config)
    for launch in launches:
        launch.run()
    output = made["output"]
    if made["packed"] is not None:
        # Exact rows are in the model's coordinates, packed ones in those they were coded in.
        part = next(part for part in parts if isinstance(part, PackedRows))
        back = made["packed"]
        if part.key_turn is not None:
            back = torch.matmul(back, part.key_turn.float().transpose(-1, -2))
        if part.key_mean is not None:
            back = back + made["share"][:, :, None] * part.key_mean.float()
        output = (output + back.view_as(output)).to(q_latent.dtype)
    return Block(output, made["lse"], None)
