"""Decode attention over packed rows and the exact rows around them, as two Triton kernels.

The first kernel gives every program one slice of the rows (a split) of one KV head and up to 8 query rows per warp; the
second merges the splits. Three choices keep the inner loop to about two instructions per code:

- Two bytes are read as one 16-bit element, so that codes reach the tensor cores' operand registers by the same loads
  as float16 numbers would. One `and` then leaves a code in the low bits of each half of a register. Those bits already
  are a number: the float16 subnormal `code * 2**-24`. Products with it are exact, so there is no conversion at all, and
  the power of two is put back in float32.
- Codes are the left operand (rows are tokens for keys, channels for values) and the queries the right one, 8 wide: a
  group of 4 query heads would leave three quarters of a 16-row operand empty.
- Scales never meet codes. One per channel multiplies the query (for each group of tokens), one per token multiplies the
  probabilities; zeros are products of their own.

Nothing here waits for the device, and the grid depends on capacities only: a step can be captured in a CUDA graph.
"""
# mypy: ignore-errors

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import tuning
from ..attention import Block, Extras
from ..packed import Format, Packed, value_half

if TYPE_CHECKING:
    from .dispatch import PackedRows

TILE = 64  # tokens of a packed tile
BLOCK_M = 8  # query rows of a program: one warp, as wide as its tensor-core product
LOG2E = math.log2(math.e)
# Probabilities times a scale would underflow in float16 far from the maximum; 2**6 leaves room for scales up to 1,000.
LIFT = tl.constexpr(64.0)
HIDDEN = tl.constexpr(-3.0e38)  # logit of an invisible row: finite, so that a fully masked query stays finite


@triton.constexpr_function
def _lanes(width, position):
    """Mask of `width` bits at `position` in each half of a 32-bit register."""
    field = ((1 << width) - 1) << position
    return hex(field | field << 16)


@triton.constexpr_function
def _chunk(rows):
    """Rows of codes that one product takes: a power of two from 16 to 64, or all rows padded to one."""
    for size in (64, 32, 16):
        if rows % size == 0:
            return size
    return max(16, 1 << (rows - 1).bit_length())


@triton.jit
def _field(x, WIDTH: tl.constexpr, POSITION: tl.constexpr, ODD: tl.constexpr, ASM: tl.constexpr):
    """Bits `POSITION .. POSITION + WIDTH` of the even or odd byte of int16 `x`, as the float16 with these bits."""
    if ASM:
        if ODD:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 8; and.b32 $0, t, " + _lanes(WIDTH, POSITION) + "; }",
                "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "and.b32 $0, $1, " + _lanes(WIDTH, POSITION) + ";",
                "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        if ODD:
            x = x >> 8
        return (x & (((1 << WIDTH) - 1) << POSITION)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _rows(base, first, count: tl.constexpr, SIZE: tl.constexpr):
    """`SIZE` rows of codes from row `first` on as `[16, SIZE]`; only `count` of them are there."""
    w = tl.arange(0, 16)
    r = tl.arange(0, SIZE)
    at = base + (first + r[None, :]) * 16 + w[:, None]
    if count >= SIZE:
        return tl.load(at)
    else:
        return tl.load(at, mask=(r < count)[None, :] & (w < 16)[:, None], other=0)


@triton.jit
def _bits(x, WIDTH: tl.constexpr, POSITION: tl.constexpr, ODD: tl.constexpr):
    """The same bits as an integer from 0."""
    return (x.to(tl.int32) >> (POSITION + 8 * ODD)) & ((1 << WIDTH) - 1)


@triton.jit
def _level(code, levels, FLOAT8: tl.constexpr):
    """Integer codes as float16 levels; those of float8 are 2**-8 too small."""
    if FLOAT8:
        return (((code & 128) << 8) | ((code & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return tl.load(levels + code)


@triton.jit
def _half(word, INDEX: tl.constexpr):
    """One of the float16 numbers in an integer word."""
    return (word >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _finish(
    s, column, live, m, query, in_chunk, softcap,
    mask, mask_column, bias, bias_column, bias_row,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Logits `[rows, queries]` in powers of two, capped, biased and masked. `column` is the row's place in the mask."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        e = tl.exp2(s * (2.8853900817779268 / softcap))
        s = softcap * 1.4426950408889634 * (1.0 - 2.0 / (e + 1.0))
    inside = live[:, None] & in_chunk[None, :]
    if BIAS:
        s += 1.4426950408889634 * tl.load(
            bias + bias_row[None, :] + column[:, None] * bias_column, mask=inside, other=0.0
        ).to(tl.float32)
    if MASK == 1:
        seen = tl.load(mask + column * mask_column, mask=live, other=0)
        s = tl.where((seen != 0)[:, None], s, HIDDEN)
    elif MASK == 2:
        seen = tl.load(mask + query[None, :] + column[:, None] * mask_column, mask=inside, other=0)
        s = tl.where(seen != 0, s, HIDDEN)
    return tl.where(live[:, None], s, float("-inf"))


@triton.jit
def _key_codes_product(
    sets, base, levels, D: tl.constexpr, R: tl.constexpr, RC: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr,
    ODD: tl.constexpr, HIGH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Products of query sets with 16 tokens whose levels are not linear in their codes."""
    CHUNKS: tl.constexpr = (R + RC - 1) // RC
    r = tl.arange(0, RC)
    w = tl.arange(0, 16)
    raw = tl.zeros([16, BLOCK_M], tl.float32)
    for f in tl.static_range(D // R):
        for n in tl.static_range(CHUNKS):
            if BITS == 3:
                inside = (n * RC + r < R)[None, :] & (w < 16)[:, None]
                low = tl.load(base + ((f % 2 * R + n * RC + r)[None, :]) * 16 + w[:, None], mask=inside, other=0)
                top = _rows(base, D // 2 + n * RC, R - n * RC, RC)
                code = _bits(low, 2, f // 2 * 2 + 4 * HIGH, ODD) | _bits(top, 1, f + 4 * HIGH, ODD) << 2
            elif BITS == 2:
                code = _bits(_rows(base, n * RC, R - n * RC, RC), 2, 2 * f + 4 * HIGH, ODD)
            else:
                code = _bits(_rows(base, n * RC, R - n * RC, RC), 4, 4 * HIGH, ODD)
                if BITS == 8:
                    code = code | _bits(_rows(base, D + n * RC, R - n * RC, RC), 4, 4 * HIGH, ODD) << 4
            raw = tl.dot(_level(code, levels, FLOAT8), sets[f * CHUNKS + n], raw)
    if FLOAT8:
        raw *= 256.0
    return raw


@triton.jit
def _query_sets(at, in_chunk, scale, R: tl.constexpr, RC: tl.constexpr, FOLDS: tl.constexpr):
    """Channels of the queries in the order of the rows of codes: a tuple of `[RC, queries]`, by fold and chunk."""
    r = tl.arange(0, RC)
    sets = ()
    for f in tl.static_range(FOLDS):
        for n in tl.static_range((R + RC - 1) // RC):
            inside = (n * RC + r < R)[:, None] & in_chunk[None, :]
            x = tl.load(at[None, :] + f * R + n * RC + r[:, None], mask=inside, other=0.0)
            sets = sets + ((x.to(tl.float32) * scale).to(tl.float16),)
    return sets


@triton.jit
def _of_group(x, first, r, GROUP: tl.constexpr, c: tl.constexpr):
    """Queries `[rows, queries]` with the channels of other groups than `c` set to 0."""
    return tl.where(((first + r) // GROUP == c)[:, None], x, 0.0).to(tl.float16)


@triton.jit
def _packed_part(
    q, constant, q_scale, softcap,
    kc, kc_b, kc_h, kc_t, ks, kz, ks_b, ks_h, k_levels,
    vc, vc_b, vc_h, vc_block, vc_t, vs, vz, vs_b, vs_h, vz_b, vz_h, v_levels,
    table, pages,
    mask, mask_column, bias, bias_column,
    b, h, m, query, bias_row, in_chunk, first_column, valid, split, splits,
    out, lse, out_row,
    D: tl.constexpr, DV: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr,
    K_BITS: tl.constexpr, K_KIND: tl.constexpr, K_TOKEN: tl.constexpr, K_GROUP: tl.constexpr,
    V_BITS: tl.constexpr, V_KIND: tl.constexpr, V_GROUP: tl.constexpr, V_WORD: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CONSTANT: tl.constexpr,
    PAGE_TILES: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, 16)
    K_LINEAR: tl.constexpr = K_KIND == "affine" or K_KIND == "symmetric"
    V_LINEAR: tl.constexpr = V_KIND == "affine" or V_KIND == "symmetric"
    K_CENTRE: tl.constexpr = (2**K_BITS - 1) / 2
    V_CENTRE: tl.constexpr = (2**V_BITS - 1) / 2
    K_GROUPS: tl.constexpr = D // K_GROUP if K_TOKEN else 1
    V_GROUPS: tl.constexpr = DV // V_GROUP
    BLOCKS: tl.constexpr = DV // (2 * V)
    H: tl.constexpr = V // 2
    FOLDED: tl.constexpr = V_BITS == 2 or V_BITS == 3
    # A row of the first plane holds codes of FOLDS channels, one of the second plane (3 and 8 bits) of FOLDS2.
    FOLDS: tl.constexpr = 1 if (K_BITS == 4 or K_BITS == 8) else 2
    WIDTH: tl.constexpr = 2 if (K_BITS == 2 or K_BITS == 3) else 4
    R: tl.constexpr = D // FOLDS
    RC: tl.constexpr = _chunk(R)
    CHUNKS: tl.constexpr = (R + RC - 1) // RC
    R2: tl.constexpr = D // 4
    RC2: tl.constexpr = _chunk(R2)
    CHUNKS2: tl.constexpr = (R2 + RC2 - 1) // RC2
    ZP: tl.constexpr = triton.next_power_of_2(V_GROUPS) if V_GROUPS > 16 else 16
    r = tl.arange(0, RC)
    r2 = tl.arange(0, RC2)
    zc = tl.arange(0, ZP)
    w_inside = w < V // 2

    # Queries as right operands [channels, queries], one for each set of channels that meets in a chunk of rows.
    q_at = q + m * D
    qf = _query_sets(q_at, in_chunk, q_scale, R, RC, FOLDS)
    q2 = ()
    if K_BITS == 3:
        q2 = _query_sets(q_at, in_chunk, q_scale, R2, RC2, 4)
    # The sets that fit whole codes, where levels are not linear in them.
    XR: tl.constexpr = R2 if K_BITS == 3 else R
    XRC: tl.constexpr = RC2 if K_BITS == 3 else RC
    XCHUNKS: tl.constexpr = CHUNKS2 if K_BITS == 3 else CHUNKS
    qx = q2 if K_BITS == 3 else qf
    rx = r2 if K_BITS == 3 else r
    if CONSTANT:
        extra = tl.load(constant + m, mask=in_chunk, other=0.0) * q_scale

    sums = ()  # of queries, over the channels of each group
    if K_TOKEN:
        for c in tl.static_range(K_GROUPS):
            whole_sum = tl.zeros([BLOCK_M], tl.float32)
            for n in tl.static_range(FOLDS * CHUNKS):
                own = _of_group(qf[n], n // CHUNKS * R + n % CHUNKS * RC, r, K_GROUP, c)
                whole_sum += tl.sum(own.to(tl.float32), 0)
            sums = sums + (whole_sum,)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([16, BLOCK_M], tl.float32)
    acc = ()
    for _ in tl.static_range(4 * BLOCKS):
        acc = acc + (tl.zeros([16, BLOCK_M], tl.float32),)
    zeros = tl.zeros([ZP, BLOCK_M], tl.float32)  # zeros of each group of channels, weighted

    tiles = (valid + 63) // 64
    per_split = (tiles + splits - 1) // splits
    start = split * per_split
    stop = tl.minimum(start + per_split, tiles)
    for tile in tl.range(start, stop, num_stages=STAGES):
        if PAGE_TILES > 0:
            page = tl.load(table + b * pages + tile // PAGE_TILES).to(tl.int64)
            at_tile = tile % PAGE_TILES
        else:
            page = b
            at_tile = tile
        token = tile * 64
        k_at = kc + page * kc_b + h * kc_h + at_tile * kc_t
        ks_at = page * ks_b + h * ks_h

        # Logits of tokens 32 i + 2 w + j, for i and j in {0, 1}.
        s = ()
        if not K_TOKEN and not K_LINEAR:
            raw = ()
            for i in tl.static_range(2):
                if i == 0 or K_GROUP < 64:
                    g_at = ks_at + ((at_tile * 64 + 32 * i) // K_GROUP) * D
                    used = token + 32 * i + tl.full([1], 0, tl.int32) < valid
                    sets = ()
                    for n in tl.static_range(D // XR * XCHUNKS):
                        inside = used & (n % XCHUNKS * XRC + rx < XR)
                        first = n // XCHUNKS * XR + n % XCHUNKS * XRC
                        sk = tl.load(ks + g_at + first + rx, mask=inside, other=0.0)
                        sets = sets + (qx[n] * sk[:, None],)
                for j in tl.static_range(2):
                    raw = raw + (
                        _key_codes_product(sets, k_at, k_levels, D, XR, XRC, K_BITS, K_KIND == "float8", j, i, BLOCK_M),
                    )
        elif not K_TOKEN:
            raw = ()  # products with codes of the first plane, in units of 2**-24
            raw2 = ()
            added = ()
            for _ in tl.static_range(4):
                raw = raw + (tl.zeros([16, BLOCK_M], tl.float32),)
                raw2 = raw2 + (tl.zeros([16, BLOCK_M], tl.float32),)
            for _ in tl.static_range(2):
                added = added + (tl.zeros([16, BLOCK_M], tl.float32),)
            # The scales of a group of tokens go into the query.
            for n in tl.static_range(CHUNKS):
                kx = _rows(k_at, n * RC, R - n * RC, RC)
                if K_BITS == 8:
                    kx2 = _rows(k_at, D + n * RC, R - n * RC, RC)
                grown = ()
                grown2 = ()
                grown_added = ()
                for i in tl.static_range(2):
                    if i == 0 or K_GROUP < 64:
                        g_at = ks_at + ((at_tile * 64 + 32 * i) // K_GROUP) * D + n * RC
                        inside = (token + 32 * i + tl.full([1], 0, tl.int32) < valid) & (n * RC + r < R)
                        scaled = ()
                        more = added[i]
                        for f in tl.static_range(FOLDS):
                            sk = tl.load(ks + g_at + f * R + r, mask=inside, other=0.0)
                            if f == 1:
                                sk *= 0.25
                            scaled = scaled + (qf[f * CHUNKS + n] * sk[:, None],)
                            if K_KIND == "affine":
                                zk = tl.load(kz + g_at + f * R + r, mask=inside, other=0.0)
                                more = tl.dot(tl.broadcast_to(zk[None, :], [16, RC]), qf[f * CHUNKS + n], more)
                            elif K_KIND == "symmetric":
                                minus = tl.full([16, RC], -K_CENTRE * (4.0 if f == 1 else 1.0), tl.float16)
                                more = tl.dot(minus, scaled[f], more)
                    grown_added = grown_added + (more,)
                    for j in tl.static_range(2):
                        x = raw[2 * i + j]
                        for f in tl.static_range(FOLDS):
                            x = tl.dot(_field(kx, WIDTH, 2 * f + 4 * i, j, ASM), scaled[f], x)
                        grown = grown + (x,)
                        if K_BITS == 8:
                            grown2 = grown2 + (tl.dot(_field(kx2, 4, 4 * i, j, ASM), scaled[0], raw2[2 * i + j]),)
                raw = grown
                added = grown_added
                if K_BITS == 8:
                    raw2 = grown2
            if K_BITS == 3:
                for n in tl.static_range(CHUNKS2):
                    kx2 = _rows(k_at, D // 2 + n * RC2, R2 - n * RC2, RC2)
                    grown2 = ()
                    for i in tl.static_range(2):
                        if i == 0 or K_GROUP < 64:
                            g_at = ks_at + ((at_tile * 64 + 32 * i) // K_GROUP) * D + n * RC2
                            inside = (token + 32 * i + tl.full([1], 0, tl.int32) < valid) & (n * RC2 + r2 < R2)
                            scaled = ()
                            for f in tl.static_range(4):
                                sk = tl.load(ks + g_at + f * R2 + r2, mask=inside, other=0.0)
                                scaled = scaled + (q2[f * CHUNKS2 + n] * (sk * (1.0 / 2**f))[:, None],)
                        for j in tl.static_range(2):
                            x = raw2[2 * i + j]
                            for f in tl.static_range(4):
                                x = tl.dot(_field(kx2, 1, f + 4 * i, j, ASM), scaled[f], x)
                            grown2 = grown2 + (x,)
                    raw2 = grown2
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                at = 32 * i + 2 * w + j
                live = token + at < valid
                if K_TOKEN:
                    logits = tl.zeros([16, BLOCK_M], tl.float32)
                    for c in tl.static_range(K_GROUPS):
                        if K_LINEAR:
                            part = tl.zeros([16, BLOCK_M], tl.float32)
                            part2 = tl.zeros([16, BLOCK_M], tl.float32)
                            for n in tl.static_range(CHUNKS):
                                kx = _rows(k_at, n * RC, R - n * RC, RC)
                                if K_BITS == 8:
                                    kx2 = _rows(k_at, D + n * RC, R - n * RC, RC)
                                for f in tl.static_range(FOLDS):
                                    own = qf[f * CHUNKS + n]
                                    if K_GROUPS > 1:
                                        own = _of_group(own, f * R + n * RC, r, K_GROUP, c)
                                    if f == 1:
                                        own *= 0.25
                                    part = tl.dot(_field(kx, WIDTH, 2 * f + 4 * i, j, ASM), own, part)
                                    if K_BITS == 8:
                                        part2 = tl.dot(_field(kx2, 4, 4 * i, j, ASM), own, part2)
                            if K_BITS == 3:
                                for n in tl.static_range(CHUNKS2):
                                    kx2 = _rows(k_at, D // 2 + n * RC2, R2 - n * RC2, RC2)
                                    for f in tl.static_range(4):
                                        own2 = q2[f * CHUNKS2 + n]
                                        if K_GROUPS > 1:
                                            own2 = _of_group(own2, f * R2 + n * RC2, r2, K_GROUP, c)
                                        own2 *= 1.0 / 2**f
                                        part2 = tl.dot(_field(kx2, 1, f + 4 * i, j, ASM), own2, part2)
                            part *= 2.0**24 / 16**i
                            if K_BITS == 8:
                                part += part2 * (2.0**28 / 16**i)
                            elif K_BITS == 3:
                                part += part2 * (2.0**26 / 16**i)
                        else:
                            sets = ()
                            for n in tl.static_range(D // XR * XCHUNKS):
                                picked = qx[n]
                                if K_GROUPS > 1:
                                    first = n // XCHUNKS * XR + n % XCHUNKS * XRC
                                    picked = _of_group(picked, first, rx, K_GROUP, c)
                                sets = sets + (picked,)
                            part = _key_codes_product(
                                sets, k_at, k_levels, D, XR, XRC, K_BITS, K_KIND == "float8", j, i, BLOCK_M
                            )
                        s_at = ks_at + (at_tile * 64 + at) * K_GROUPS + c
                        sk = tl.load(ks + s_at, mask=live, other=0.0).to(tl.float32)
                        if K_KIND == "symmetric":
                            part -= K_CENTRE * sums[c][None, :]
                        part *= sk[:, None]
                        if K_KIND == "affine":
                            zk = tl.load(kz + s_at, mask=live, other=0.0).to(tl.float32)
                            part += zk[:, None] * sums[c][None, :]
                        logits += part
                else:
                    logits = raw[2 * i + j]
                    if K_LINEAR:
                        logits = logits * (2.0**24 / 16**i) + added[i]
                        if K_BITS == 8:
                            logits += raw2[2 * i + j] * (2.0**28 / 16**i)
                        elif K_BITS == 3:
                            logits += raw2[2 * i + j] * (2.0**26 / 16**i)
                if CONSTANT:
                    logits += extra[None, :]
                s = s + (
                    _finish(
                        logits, first_column + token + at, live, m, query, in_chunk, softcap,
                        mask, mask_column, bias, bias_column, bias_row, SOFTCAP, MASK, BIAS,
                    ),
                )  # fmt: skip

        new_top = tl.maximum(top, tl.max(tl.maximum(tl.maximum(s[0], s[1]), tl.maximum(s[2], s[3])), 0))
        fade = tl.exp2(top - new_top)
        top = new_top
        total *= fade[None, :]
        faded = ()
        for n in tl.static_range(4 * BLOCKS):
            faded = faded + (acc[n] * fade[None, :],)
        acc = faded
        zeros *= fade[None, :]

        # Values: 16 tokens at a time are the inner dimension of a product, in the order that the logits came in.
        v_at = vc + page * vc_b + h * vc_h + at_tile * vc_t
        for j in tl.static_range(2):
            for i in tl.static_range(2):
                at = 32 * i + 2 * w + j
                live = token + at < valid
                p = tl.exp2(s[2 * i + j] - top[None, :])
                total += p
                p16 = (p * LIFT).to(tl.float16)
                words = ()
                s_at = page * vs_b + h * vs_h + (at_tile * 64 + at) * (V_GROUPS // V_WORD)
                for n in tl.static_range(V_GROUPS // V_WORD):
                    words = words + (tl.load(vs + s_at + n, mask=live, other=0),)
                if V_LINEAR:
                    z_at = page * vz_b + h * vz_h + (at_tile * 64 + at) * V_GROUPS
                    z = tl.load(
                        vz + z_at[None, :] + zc[:, None], mask=(zc < V_GROUPS)[:, None] & live[None, :], other=0.0
                    )
                    zeros = tl.dot(z, p16, zeros)
                grown = ()
                for block in tl.static_range(BLOCKS):
                    y_at = v_at + block * vc_block + w[:, None]
                    row = 2 * w + j if FOLDED else at
                    if V == 32:
                        y = tl.load(y_at + row[None, :] * H)
                        if V_BITS == 8:
                            y2 = tl.load(y_at + (64 + row[None, :]) * H)
                        elif V_BITS == 3:
                            y2 = tl.load(y_at + (32 + row[None, :] % 16) * H)
                    else:
                        inside = w_inside[:, None] & (w < 16)[None, :]
                        y = tl.load(y_at + row[None, :] * H, mask=inside, other=0)
                        if V_BITS == 8:
                            y2 = tl.load(y_at + (64 + row[None, :]) * H, mask=inside, other=0)
                        elif V_BITS == 3:
                            y2 = tl.load(y_at + (32 + row[None, :] % 16) * H, mask=inside, other=0)
                    for hc in tl.static_range(2):
                        for jc in tl.static_range(2):
                            mine = acc[4 * block + 2 * hc + jc]
                            for c in tl.static_range(
                                (2 * block + hc) * V // V_GROUP, ((2 * block + hc + 1) * V - 1) // V_GROUP + 1
                            ):
                                sv = _half(words[c // V_WORD], c % V_WORD)
                                before = mine
                                if V_LINEAR:
                                    if FOLDED and i == 1:
                                        weighted = p16 * (sv * 0.25)[:, None]
                                    else:
                                        weighted = p16 * sv[:, None]
                                    if FOLDED:
                                        mine = tl.dot(_field(y, 2, 2 * i + 4 * hc, jc, ASM), weighted, mine)
                                    else:
                                        mine = tl.dot(_field(y, 4, 4 * hc, jc, ASM), weighted, mine)
                                    if V_BITS == 8:
                                        mine = tl.dot(_field(y2, 4, 4 * hc, jc, ASM), weighted * 16.0, mine)
                                    elif V_BITS == 3:
                                        # Tokens 16 .. 31 of a half have their high bit one place further.
                                        later = (w >= 8)[:, None]
                                        early = tl.where(later, 0.0, weighted * 4.0).to(tl.float16)
                                        late = tl.where(later, weighted * 2.0, 0.0).to(tl.float16)
                                        mine = tl.dot(_field(y2, 1, 2 * i + 4 * hc, jc, ASM), early, mine)
                                        mine = tl.dot(_field(y2, 1, 2 * i + 1 + 4 * hc, jc, ASM), late, mine)
                                else:
                                    weighted = p16 * sv[:, None]
                                    if FOLDED:
                                        code = _bits(y, 2, 2 * i + 4 * hc, jc)
                                        if V_BITS == 3:
                                            late = (w >= 8)[None, :].to(tl.int16)
                                            code = code | _bits(y2 >> late, 1, 2 * i + 4 * hc, jc) << 2
                                    else:
                                        code = _bits(y, 4, 4 * hc, jc)
                                        if V_BITS == 8:
                                            code = code | _bits(y2, 4, 4 * hc, jc) << 4
                                    mine = tl.dot(_level(code, v_levels, V_KIND == "float8"), weighted, mine)
                                if V_GROUP % V > 0:
                                    channel = (2 * block + hc) * V + 2 * w + jc
                                    mine = tl.where((channel // V_GROUP == c)[:, None], mine, before)
                            grown = grown + (mine,)
                acc = grown

    seen = tl.sum(total, 0)
    factor = tl.where(seen > 0, 1.0 / (seen * LIFT), 0.0)
    for block in tl.static_range(BLOCKS):
        for hc in tl.static_range(2):
            for jc in tl.static_range(2):
                channel = (2 * block + hc) * V + 2 * w + jc
                x = acc[4 * block + 2 * hc + jc]
                if V_LINEAR:
                    x *= 2.0**24 / 16**hc
                    for c in tl.static_range(
                        (2 * block + hc) * V // V_GROUP, ((2 * block + hc + 1) * V - 1) // V_GROUP + 1
                    ):
                        z = tl.sum(tl.where((zc == c)[:, None], zeros, 0.0), 0)
                        if V_KIND == "symmetric":
                            z *= -V_CENTRE
                        x += tl.where((channel // V_GROUP == c)[:, None], z[None, :], 0.0)
                elif V_KIND == "float8":
                    x *= 256.0
                tl.store(
                    out + (out_row + m[None, :]) * DV + channel[:, None],
                    x * factor[None, :],
                    mask=w_inside[:, None] & in_chunk[None, :],
                )
    tl.store(lse + out_row + m, tl.where(seen > 0, top + tl.log2(seen), float("-inf")), mask=in_chunk)


@triton.jit
def _exact_part(
    q, q_scale, softcap,
    keys, k_b, k_h, k_n, values, v_b, v_h, v_n,
    mask, mask_column, bias, bias_column,
    b, h, m, query, bias_row, in_chunk, first_column, valid, split, splits,
    out, lse, out_row,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    DP: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    DVP: tl.constexpr = triton.next_power_of_2(DV) if DV > 16 else 16
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    kind = keys.dtype.element_ty
    x = tl.load(q + m[None, :] * D + d[:, None], mask=(d < D)[:, None] & in_chunk[None, :], other=0.0)
    x = x.to(kind)  # [D, queries]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = tl.zeros([DVP, BLOCK_M], tl.float32)
    blocks = (valid + BLOCK_N - 1) // BLOCK_N
    per_split = (blocks + splits - 1) // splits
    start = split * per_split
    stop = tl.minimum(start + per_split, blocks)
    for block in tl.range(start, stop, num_stages=STAGES):
        at = block * BLOCK_N + n
        live = at < valid
        rows = tl.load(
            keys + b * k_b + h * k_h + at[:, None] * k_n + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        s = tl.dot(rows, x, input_precision="ieee") * q_scale
        s = _finish(
            s, first_column + at, live, m, query, in_chunk, softcap,
            mask, mask_column, bias, bias_column, bias_row, SOFTCAP, MASK, BIAS,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 0))
        fade = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(s - top[None, :])
        total = total * fade[None, :] + p
        rows = tl.load(
            values + b * v_b + h * v_h + at[None, :] * v_n + dv[:, None],
            mask=live[None, :] & (dv < DV)[:, None],
            other=0.0,
        )
        acc = tl.dot(rows, p.to(rows.dtype), acc * fade[None, :], input_precision="ieee")
    seen = tl.sum(total, 0)
    factor = tl.where(seen > 0, 1.0 / seen, 0.0)
    tl.store(
        out + (out_row + m[None, :]) * DV + dv[:, None],
        acc * factor[None, :],
        mask=(dv < DV)[:, None] & in_chunk[None, :],
    )
    tl.store(lse + out_row + m, tl.where(seen > 0, top + tl.log2(seen), float("-inf")), mask=in_chunk)


# Numbers that change from step to step must not pick another variant of a kernel.
_CHANGING = ["length", "front", "tail", "splits", "packed_splits", "front_splits", "pages", "rows", "q_len", "heads"]
_CHANGING_STRIDES = ["mask_b", "mask_h", "mask_q", "bias_b", "bias_g", "bias_q"]


@triton.jit(do_not_specialize=_CHANGING + _CHANGING_STRIDES)
def split_kernel(
    q, q_packed, constant, q_scale, softcap,
    kc, kc_b, kc_h, kc_t, ks, kz, ks_b, ks_h, k_levels,
    vc, vc_b, vc_h, vc_block, vc_t, vs, vz, vs_b, vs_h, vz_b, vz_h, v_levels,
    table, pages, lengths, length,
    fk, fk_b, fk_h, fk_n, fv, fv_b, fv_h, fv_n, front,
    tk, tk_b, tk_h, tk_n, tv, tv_b, tv_h, tv_n, tail_lengths, tail,
    mask, mask_b, mask_h, mask_q, mask_n, bias, bias_b, bias_g, bias_q, bias_n,
    out, lse, heads, rows, q_len, packed_splits, front_splits, splits,
    D: tl.constexpr, DV: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    K_BITS: tl.constexpr, K_KIND: tl.constexpr, K_TOKEN: tl.constexpr, K_GROUP: tl.constexpr,
    V_BITS: tl.constexpr, V_KIND: tl.constexpr, V_GROUP: tl.constexpr, V_WORD: tl.constexpr,
    PACKED: tl.constexpr, FRONT: tl.constexpr, LENGTHS: tl.constexpr, TAIL_LENGTHS: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CONSTANT: tl.constexpr,
    PAGE_TILES: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attention of one split. Grid: (splits * chunks of BLOCK_M query rows, batch * KV heads).

    Chunks of the same rows run next to each other, so that all but the first find the codes in the L2 cache.
    """
    chunks = (rows + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(0) // chunks
    bh = tl.program_id(1).to(tl.int64)
    b = bh // heads
    h = bh % heads
    m = tl.program_id(0) % chunks * BLOCK_M + tl.arange(0, BLOCK_M)
    in_chunk = m < rows
    q += bh * rows * D
    q_packed += bh * rows * D
    constant += bh * rows
    # Row m holds query head m // q_len of the group and query m % q_len.
    query = (m % q_len) * mask_q
    mask += b * mask_b + h * mask_h
    bias_row = (h * (rows // q_len) + m // q_len) * bias_g + (m % q_len) * bias_q
    bias += b * bias_b
    out_row = (bh * splits + split) * rows
    if PACKED and split < packed_splits:
        valid = length
        if LENGTHS:
            valid = tl.minimum(tl.load(lengths + b), length)
        _packed_part(
            q_packed, constant, q_scale, softcap,
            kc, kc_b, kc_h, kc_t, ks, kz, ks_b, ks_h, k_levels,
            vc, vc_b, vc_h, vc_block, vc_t, vs, vz, vs_b, vs_h, vz_b, vz_h, v_levels,
            table, pages, mask, mask_n, bias, bias_n,
            b, h, m, query, bias_row, in_chunk, front, valid, split, packed_splits, out, lse, out_row,
            D, DV, V, BLOCK_M, K_BITS, K_KIND, K_TOKEN, K_GROUP, V_BITS, V_KIND, V_GROUP, V_WORD,
            SOFTCAP, MASK, BIAS, CONSTANT, PAGE_TILES, STAGES, ASM,
        )  # fmt: skip
    elif FRONT and split < packed_splits + front_splits:
        _exact_part(
            q, q_scale, softcap, fk, fk_b, fk_h, fk_n, fv, fv_b, fv_h, fv_n,
            mask, mask_n, bias, bias_n,
            b, h, m, query, bias_row, in_chunk, 0, front, split - packed_splits, front_splits, out, lse, out_row,
            D, DV, BLOCK_M, BLOCK_N, SOFTCAP, MASK, BIAS, STAGES,
        )  # fmt: skip
    else:
        valid = tail
        if TAIL_LENGTHS:
            valid = tl.minimum(tl.load(tail_lengths + b), tail)
        before = packed_splits + front_splits
        _exact_part(
            q, q_scale, softcap, tk, tk_b, tk_h, tk_n, tv, tv_b, tv_h, tv_n,
            mask, mask_n, bias, bias_n,
            b, h, m, query, bias_row, in_chunk, front + length, valid, split - before, splits - before,
            out, lse, out_row, D, DV, BLOCK_M, BLOCK_N, SOFTCAP, MASK, BIAS, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "rows", "q_len", "packed_splits", "splits"])
def merge_kernel(
    parts, lse, sinks, out, out_packed, out_lse, heads, rows, q_len, packed_splits, splits,
    DV: tl.constexpr, DVP: tl.constexpr, BLOCK_S: tl.constexpr, ALL_S: tl.constexpr,
    SINKS: tl.constexpr, APART: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One query row: the weighted sum of its splits. With APART the packed rows' share goes to a place of its own."""
    row = tl.program_id(0)
    bh = (row // rows).to(tl.int64)
    m = row % rows
    every = tl.arange(0, ALL_S)
    logs = tl.load(lse + (bh * splits + every) * rows + m, mask=every < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + (bh % heads) * (rows // q_len) + m // q_len).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(tl.exp2(logs - top), 0)
    if SINKS:
        weight += tl.exp2(sink - top)
    d = tl.arange(0, DVP)
    packed = tl.zeros([DVP], tl.float32)
    exact = tl.zeros([DVP], tl.float32)
    for start in tl.range(0, splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        one = tl.load(lse + (bh * splits + s) * rows + m, mask=s < splits, other=float("-inf"))
        share = tl.exp2(one - top)
        x = tl.load(
            parts + ((bh * splits + s) * rows + m)[:, None] * DV + d[None, :],
            mask=(s < splits)[:, None] & (d < DV)[None, :],
            other=0.0,
        )
        if APART:
            mine = (s < packed_splits)[:, None]
            packed += tl.sum(tl.where(mine, share[:, None] * x, 0.0), 0)
            exact += tl.sum(tl.where(mine, 0.0, share[:, None] * x), 0)
        else:
            exact += tl.sum(share[:, None] * x, 0)
    inverse = tl.where(weight > 0, 1.0 / weight, 0.0)
    at = (bh * rows + m) * DV + d
    tl.store(out + at, (exact * inverse).to(out.dtype.element_ty), mask=d < DV)
    if APART:
        tl.store(out_packed + at, packed * inverse, mask=d < DV)
    if LSE:
        natural = tl.where(weight > 0, (top + tl.log2(weight)) * 0.6931471805599453, float("-inf"))
        tl.store(out_lse + bh * rows + m, natural)


class Launch(NamedTuple):
    """One kernel with everything it is started with."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]  # tensors, numbers and compile-time constants, by name
    options: dict[str, int]  # num_warps and so on

    def run(self) -> None:
        self.kernel[self.grid](**self.args, **self.options)


def _format_fits(fmt: Format, role: str, dim: int) -> bool:
    if fmt.kind not in ("affine", "symmetric", "codebook", "float8") or (fmt.kind == "float8" and fmt.bits != 8):
        return False
    if fmt.axis == "token":
        return dim % fmt.group == 0
    return role == "keys" and fmt.group % 32 == 0


def supports(
    query: torch.Tensor,
    packed: PackedRows | None,
    tail: tuple[torch.Tensor, torch.Tensor],
    extras: Extras,
    need_probs: bool = False,
) -> bool:
    """Whether `decode_attention` takes this step (else: the reference). Devices are the dispatcher's business."""
    d, dv = query.shape[-1], tail[1].shape[-1]
    if need_probs or extras.dropout > 0 or query.shape[2] > 16 or d > 256 or dv > 256:
        return False
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    if packed is None:
        return True
    fits = _format_fits(packed.key_format, "keys", d) and _format_fits(packed.value_format, "values", dv)
    return fits and packed.half == 32 and d % 4 == 0 and dv % 4 == 0 and value_half(dv, 32) >= 2


def _scales(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros (scales again where there are none) in float16, laid out alike, with no gaps between rows."""
    scale = packed.scale.half()
    zero = scale if packed.zero is None else packed.zero.half()
    rows = scale.shape[2] == 1 or scale.stride(2) == scale.shape[3]
    if scale.stride() != zero.stride() or scale.stride(3) != 1 or not rows:
        return scale.contiguous(), zero.contiguous()
    return scale, zero


def _words(scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scales per token as integer words of several groups each: one load instead of many."""
    for size, dtype in ((4, torch.int64), (2, torch.int32)):
        if scale.shape[-1] % size == 0 and _divides(scale, size):
            return scale.view(dtype), size
    return scale.view(torch.int16), 1


def _divides(tensor: torch.Tensor, size: int) -> bool:
    strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return tensor.storage_offset() % size == 0 and all(s % size == 0 for s in strides)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides of dimensions of size 1 as 0, so that they do not pick another variant of the kernel."""
    return [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]


def _rows_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def plan(
    query: torch.Tensor,
    front: tuple[torch.Tensor, torch.Tensor] | None,
    packed: PackedRows | None,
    tail: tuple[torch.Tensor, torch.Tensor],
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    need_lse: bool = False,
    *,
    lengths: torch.Tensor | None = None,
    tail_lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_tiles: int = 0,
    entry: tuning.Entry | None = None,
    target: str | None = None,
    inline_asm: bool | None = None,
) -> tuple[list[Launch], dict[str, torch.Tensor | None]]:
    """The launches of one step and the tensors they fill. See `decode_attention` for the arguments."""
    b, hq, q_len, d = query.shape
    tk, tv = (_rows_last(t) for t in tail)
    hk, dv = tk.shape[1], tv.shape[3]
    rows = hq // hk * q_len
    folded = query.reshape(b, hk, rows, d).contiguous()
    turned, constant = folded, None
    device = query.device
    if packed is not None:
        if packed.key_scale is not None:
            turned = turned.float() * packed.key_scale[:, :, None].float()
        if packed.key_turn is not None:
            turned = torch.matmul(turned.float(), packed.key_turn.float())
        if packed.key_mean is not None:
            constant = torch.matmul(folded.float(), packed.key_mean[:, :, :, None].float()).contiguous()
        turned = turned.contiguous()
    if inline_asm is None:
        inline_asm = device.type == "cuda" and torch.version.hip is None

    length = 0 if packed is None else packed.length
    bits = 16 if packed is None else max(packed.key_format.bits, packed.value_format.bits)
    if entry is None:
        entry = tuning.lookup(target or tuning.target_of(device), bits, max(d, dv))
    programs = b * hk * -(-rows // BLOCK_M)
    packed_splits = tuning.split_count(entry, -(-length // TILE), programs) if length else 0
    front_rows = 0 if front is None else front[0].shape[2]
    front_splits = tuning.split_count(entry, -(-front_rows // entry.block_n), programs) if front_rows else 0
    tail_rows = tk.shape[2]
    tail_splits = tuning.split_count(entry, -(-tail_rows // entry.block_n), programs) if tail_rows else 0
    splits = packed_splits + front_splits + tail_splits
    parts = torch.empty(b * hk, splits, rows, dv, dtype=torch.float32, device=device)
    part_lse = torch.empty(b * hk, splits, rows, dtype=torch.float32, device=device)

    scale = extras.scaling * (LOG2E if extras.softcap is None else 1.0)
    args: dict[str, Any] = dict(
        q=folded, q_packed=turned, constant=constant if constant is not None else part_lse,
        q_scale=float(scale), softcap=float(extras.softcap or 1.0),
    )  # fmt: skip
    if packed is not None and length:
        codes_k, codes_v = packed.keys.codes.view(torch.int16), packed.values.codes.view(torch.int16)
        fk, fv = packed.key_format, packed.value_format
        ks, kz = _scales(packed.keys)
        halves, zero_v = _scales(packed.values)
        scale_v, word = _words(halves)
        sz = _strides(zero_v)
        sk, sc, sv, sw = _strides(codes_k), _strides(ks), _strides(codes_v), _strides(scale_v)
        args |= dict(
            kc=codes_k, kc_b=sk[0], kc_h=sk[1], kc_t=sk[2],
            ks=ks, kz=kz, ks_b=sc[0], ks_h=sc[1],
            k_levels=_level_table(fk, device), vc=codes_v, vc_b=sv[0], vc_h=sv[1], vc_block=sv[2], vc_t=sv[3],
            vs=scale_v, vz=zero_v, vs_b=sw[0], vs_h=sw[1], vz_b=sz[0], vz_h=sz[1], v_levels=_level_table(fv, device),
            table=part_lse if block_table is None else block_table,
            pages=0 if block_table is None else block_table.stride(0),
            lengths=part_lse if lengths is None else lengths, length=length,
        )  # fmt: skip
        static: dict[str, Any] = dict(
            V=value_half(dv, 32), K_BITS=fk.bits, K_KIND=fk.kind, K_TOKEN=fk.axis == "token", K_GROUP=fk.group,
            V_BITS=fv.bits, V_KIND=fv.kind, V_GROUP=fv.group, V_WORD=word, PACKED=True, LENGTHS=lengths is not None,
            PAGE_TILES=0 if block_table is None else page_tiles, CONSTANT=constant is not None,
        )  # fmt: skip
    else:
        none = part_lse
        args |= dict(
            kc=none, kc_b=0, kc_h=0, kc_t=0, ks=none, kz=none, ks_b=0, ks_h=0, k_levels=none,
            vc=none, vc_b=0, vc_h=0, vc_block=0, vc_t=0, vs=none, vz=none, vs_b=0, vs_h=0, vz_b=0, vz_h=0,
            v_levels=none,
            table=none, pages=0, lengths=none, length=0,
        )  # fmt: skip
        static = dict(
            V=32, K_BITS=4, K_KIND="affine", K_TOKEN=False, K_GROUP=32, V_BITS=4, V_KIND="affine", V_GROUP=32,
            V_WORD=1, PACKED=False, LENGTHS=False, PAGE_TILES=0, CONSTANT=False,
        )  # fmt: skip
    for name, pair, count in (("f", front, front_rows), ("t", (tk, tv), tail_rows)):
        keys, values = (tk, tv) if pair is None else (_rows_last(t) for t in pair)
        s, t = _strides(keys), _strides(values)
        args |= {f"{name}k": keys, f"{name}k_b": s[0], f"{name}k_h": s[1], f"{name}k_n": s[2]}
        args |= {f"{name}v": values, f"{name}v_b": t[0], f"{name}v_h": t[1], f"{name}v_n": t[2]}
        args["front" if name == "f" else "tail"] = count
    args["tail_lengths"] = part_lse if tail_lengths is None else tail_lengths
    mask = part_lse if visible is None else visible.view(torch.uint8)
    ms = [0] * 4 if visible is None else _strides(mask)
    extra = part_lse if bias is None else bias
    es = [0] * 4 if bias is None else _strides(bias)
    if bias is not None and bias.shape[1] not in (1, hq):
        extra = bias.repeat_interleave(hq // bias.shape[1], dim=1)
        es = _strides(extra)
    args |= dict(
        mask=mask, mask_b=ms[0], mask_h=ms[1], mask_q=ms[2], mask_n=ms[3],
        bias=extra, bias_b=es[0], bias_g=es[1], bias_q=es[2], bias_n=es[3],
        out=parts, lse=part_lse, heads=hk, rows=rows, q_len=q_len,
        packed_splits=packed_splits, front_splits=front_splits, splits=splits,
        D=d, DV=dv, BLOCK_M=BLOCK_M, BLOCK_N=entry.block_n, FRONT=front_rows > 0,
        TAIL_LENGTHS=tail_lengths is not None, SOFTCAP=extras.softcap is not None,
        MASK=0 if visible is None else 1 if ms[2] == 0 else 2,  # one for all queries, or one each
        BIAS=bias is not None, STAGES=entry.num_stages, ASM=inline_asm, **static,
    )  # fmt: skip
    first = Launch(
        split_kernel,
        (splits * -(-rows // BLOCK_M), b * hk),
        args,
        dict(num_warps=entry.num_warps, num_stages=entry.num_stages),
    )

    apart = packed is not None and packed.value_turn is not None and packed_splits > 0
    output = torch.empty(b, hq, q_len, dv, dtype=torch.float32 if apart else query.dtype, device=device)
    share = torch.empty(b, hk, rows, dv, dtype=torch.float32, device=device) if apart else None
    lse = torch.empty(b, hq, q_len, dtype=torch.float32, device=device) if need_lse else None
    second = Launch(
        merge_kernel,
        (b * hk * rows,),
        dict(
            parts=parts, lse=part_lse, sinks=part_lse if extras.sinks is None else extras.sinks,
            out=output, out_packed=parts if share is None else share, out_lse=part_lse if lse is None else lse,
            heads=hk, rows=rows, q_len=q_len, packed_splits=packed_splits, splits=splits,
            DV=dv, DVP=triton.next_power_of_2(dv), BLOCK_S=32, ALL_S=max(32, triton.next_power_of_2(splits)),
            SINKS=extras.sinks is not None, APART=apart, LSE=need_lse,
        ),
        dict(num_warps=4, num_stages=1),
    )  # fmt: skip
    return [first, second], dict(output=output, packed=share, lse=lse)


_TABLES: dict[tuple[tuple[float, ...] | None, torch.device], torch.Tensor] = {}


def _level_table(fmt: Format, device: torch.device) -> torch.Tensor:
    """The codebook on the device, made once: a copy from the host could not be captured in a graph."""
    key = (fmt.levels, device)
    if key not in _TABLES:
        _TABLES[key] = torch.tensor(fmt.levels or (0.0,), dtype=torch.float16, device=device)
    return _TABLES[key]


def decode_attention(
    query: torch.Tensor,  # [B, Hq, Q, D], Q up to 16
    front: tuple[torch.Tensor, torch.Tensor] | None,  # exact keys, values [B, Hk, F, D] before the packed rows
    packed: PackedRows | None,
    tail: tuple[torch.Tensor, torch.Tensor],  # exact keys, values after them
    extras: Extras,
    visible: torch.Tensor | None = None,  # bool, broadcastable to [B, Hk, Q, F + length + T]
    bias: torch.Tensor | None = None,  # additive, broadcastable to [B, Hq, Q, F + length + T]
    need_probs: bool = False,
    need_lse: bool = False,
    *,
    lengths: torch.Tensor | None = None,  # int32 [B]: packed rows in use; `packed.length` is then the capacity
    tail_lengths: torch.Tensor | None = None,  # int32 [B]: exact rows in use of `tail`
    block_table: torch.Tensor | None = None,  # int32 [B, pages]: where each page of `page_tiles` tiles lies
    page_tiles: int = 0,
    entry: tuning.Entry | None = None,
    inline_asm: bool | None = None,
) -> Block:
    """Attention over all rows in one pass: front, packed, tail. The same as `dispatch.decode_attention`.

    With `block_table` the packed tensors are pools: codes `[P, H, page_tiles, ...]` (values `[P, H, blocks, page_tiles,
    ...]`) and scales `[P, H, ...]` of one page each; page `n` of batch row `b` is `block_table[b, n]`.
    """
    assert not need_probs, "probabilities are never formed here"
    launches, made = plan(
        query, front, packed, tail, extras, visible, bias, need_lse,
        lengths=lengths, tail_lengths=tail_lengths, block_table=block_table, page_tiles=page_tiles,
        entry=entry, inline_asm=inline_asm,
    )  # fmt: skip
    for launch in launches:
        launch.run()
    output = made["output"]
    if made["packed"] is not None:
        # The exact rows are in the model's coordinates, the packed ones in those they were written in.
        back = torch.matmul(made["packed"], packed.value_turn.float().transpose(-1, -2))
        output = (output + back.view_as(output)).to(query.dtype)
    return Block(output, made["lse"], None)
