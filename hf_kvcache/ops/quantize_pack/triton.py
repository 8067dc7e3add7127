"""Quantize exact rows and pack their codes, on the GPU.

The first kernel finds the scale (and zero) of every group, the second writes bytes: each one is put together from the
numbers whose codes meet in it, so no code ever lies unpacked in memory. Codes of affine formats are those of the
reference bit for bit. The others are chosen from the root mean square of a group, whose last bit depends on the order
of the sum: a number that lies on the border between two levels to within a rounding error may get the other one.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed import Format, Packed, codes_shape, step_of, value_half
from .reference import STEPS


@triton.jit
def _round(x):
    """Half to even, for numbers from 0 to 255."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _divide(x, by):
    return tl.where(by == 0, 0.0, tl.div_rn(x, tl.where(by == 0, 1.0, by)))


@triton.jit
def _code(x, low, step, bounds, BITS: tl.constexpr, KIND: tl.constexpr):
    """Codes (as float32) of numbers, from the group's zero and scale (affine), its root mean square (codebook) or that
    and the step of the grid (symmetric: `low`), in `step`."""
    TOP: tl.constexpr = 2**BITS - 1
    if KIND == "affine":
        return _round(tl.minimum(tl.maximum(_divide(x - low, step), 0.0), TOP))
    unit = _divide(x, step)
    if KIND == "symmetric":
        return _round(tl.minimum(tl.maximum(_divide(unit, low) + TOP / 2, 0.0), TOP))
    code = tl.zeros(unit.shape, tl.float32)
    for i in range(TOP):
        code += tl.where(unit > tl.load(bounds + i), 1.0, 0.0)
    return code


@triton.jit(do_not_specialize=["groups"])
def _scale_kernel(
    x, x_b, x_h, x_n, scale, zero, step, grid, levels, bounds, heads, groups, per_row,
    GROUP: tl.constexpr, SIZE: tl.constexpr, MANY: tl.constexpr, TOKEN: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, STEPS: tl.constexpr, UNBIASED: tl.constexpr,
):  # fmt: skip
    """Scales of MANY groups, `[MANY, SIZE]` with SIZE the power of two from GROUP on; rows have `per_row` groups."""
    bh = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * MANY + tl.arange(0, MANY)
    e = tl.arange(0, SIZE)[None, :]
    row = (n // per_row)[:, None]
    at = (n % per_row)[:, None]
    inside = (n < groups)[:, None] & (e < GROUP)
    base = x + (bh // heads) * x_b + (bh % heads) * x_h
    if TOKEN:
        where = base + row * x_n + at * GROUP + e
    else:
        where = base + (row * GROUP + e) * x_n + at
    value = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    out = bh * groups + n
    TOP: tl.constexpr = 2**BITS - 1
    if KIND == "affine":
        low = tl.min(tl.where(inside, value, float("inf")), 1)
        high = tl.max(tl.where(inside, value, float("-inf")), 1)
        reach = (high - low) * 0.5
        spread = tl.div_rn(reach * 2.0, tl.full([MANY], TOP, tl.float32))
        tl.store(scale + out, spread.to(tl.float16), mask=n < groups)
        tl.store(zero + out, low.to(tl.float16), mask=n < groups)
    else:
        square = tl.sum(value * value, 1)
        rms = tl.sqrt_rn(tl.div_rn(square, tl.full([MANY], GROUP, tl.float32)))
        if KIND == "symmetric":
            # The grid whose step keeps most of the direction of each group.
            unit = _divide(value, rms[:, None])
            level = unit
            score = tl.full([MANY], -1.0, tl.float32)
            chosen = tl.zeros([MANY], tl.float32)
            for i in tl.static_range(len(STEPS)):
                width = tl.full([MANY, 1], STEPS[i], tl.float32)
                new = _code(value, width, rms[:, None], bounds, BITS, KIND) - TOP / 2
                product = tl.sum(tl.where(inside, unit * new, 0.0), 1)
                cosine = product * product / tl.sum(tl.where(inside, new * new, 0.0), 1)
                better = cosine > score
                score = tl.where(better, cosine, score)
                chosen = tl.where(better, STEPS[i], chosen)
                level = tl.where(better[:, None], new, level)
            tl.store(grid + out, chosen, mask=n < groups)
        else:
            code = _code(value, 0.0, rms[:, None], bounds, BITS, KIND)
            level = tl.load(levels + code.to(tl.int32))
        along = tl.sum(value * level, 1)
        if UNBIASED:
            spread = _divide(square, along)
        else:
            spread = _divide(along, tl.sum(tl.where(inside, level * level, 0.0), 1))
        tl.store(scale + out, spread.to(tl.float16), mask=n < groups)
        tl.store(step + out, rms, mask=n < groups)


@triton.jit
def _code_at(
    x, x_n, scale, zero, step, grid, bounds, token, channel, rows, D: tl.constexpr, BITS: tl.constexpr,
    TOKEN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Codes of single numbers; 0 for tokens that are not there."""
    inside = (token >= 0) & (token < rows) & (channel < D)
    value = tl.load(x + token * x_n + channel, mask=inside, other=0.0).to(tl.float32)
    if TOKEN:
        at = token * (D // GROUP) + channel // GROUP
    else:
        at = token // GROUP * D + channel
    if KIND == "affine":
        spread = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        low = tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
    else:
        spread = tl.load(step + at, mask=inside, other=0.0)
        low = tl.load(grid + at, mask=inside, other=0.0)
    code = _code(value, low, spread, bounds, BITS, KIND).to(tl.int32)
    return tl.where(inside, code, 0)


@triton.jit(do_not_specialize=["rows", "groups", "lead", "tiles"])
def _pack_kernel(
    x, x_b, x_h, x_n, scale, zero, step, grid, bounds, out, heads, rows, groups, lead, tiles,
    D: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, BITS: tl.constexpr, TOKEN: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Bytes `[BLOCK_R, width]` of one tile (and block of value channels). Grid: (tiles * row blocks, B * H, blocks)."""
    NIBBLES: tl.constexpr = D if KEYS else 64
    BYTES: tl.constexpr = NIBBLES * BITS // 4
    WIDTH: tl.constexpr = 32 if KEYS else V
    parts = (BYTES + BLOCK_R - 1) // BLOCK_R
    tile = tl.program_id(0) // parts
    bh = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    row = tl.program_id(0) % parts * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    x += (bh // heads) * x_b + (bh % heads) * x_h
    scale += bh * groups
    zero += bh * groups
    step += bh * groups
    grid += bh * groups
    byte = tl.zeros([BLOCK_R, WIDTH], tl.int32)
    for high in tl.static_range(2):
        for piece in tl.static_range(1 if BITS == 4 or BITS == 8 else (2 if BITS == 2 else 4)):
            # Which row of nibbles gives this piece of a byte, which bits of its code, and where they go.
            if BITS == 4:
                nibble = row
                drop = 0
                keep = 15
                place = 0
            elif BITS == 8:
                nibble = row % NIBBLES
                drop = row // NIBBLES * 4
                keep = 15
                place = 0
            elif BITS == 2:
                nibble = row + piece * (NIBBLES // 2)
                drop = 0
                keep = 3
                place = 2 * piece
            else:
                top = row >= NIBBLES // 2
                nibble = tl.where(top, row - NIBBLES // 2 + piece * (NIBBLES // 4), row + piece % 2 * (NIBBLES // 2))
                drop = tl.where(top, 2, 0)
                keep = tl.where(top, 1, tl.where(piece < 2, 3, 0))
                place = tl.where(top, piece, 2 * (piece % 2))
            if KEYS:
                token = tile * 64 + 32 * high + column - lead
                channel = nibble
            else:
                token = tile * 64 + nibble - lead
                channel = (2 * block + high) * V + column
            token, channel = tl.broadcast(token, channel)
            code = _code_at(x, x_n, scale, zero, step, grid, bounds, token, channel, rows, D, BITS, TOKEN, GROUP, KIND)
            byte = byte | ((code >> drop) & keep) << (place + 4 * high)
    at = ((bh * (1 if KEYS else D // (2 * V)) + block) * tiles + tile) * (BYTES * WIDTH)
    tl.store(out + at + row * WIDTH + column, byte.to(tl.uint8), mask=row < BYTES)


def supports(fmt: Format, half: int) -> bool:
    if half != 32 or fmt.kind == "float8":
        return False
    return fmt.fit == "minmax" if fmt.kind == "affine" else True


def quantize_pack(x: torch.Tensor, fmt: Format, role: str, half: int = 32, lead: int = 0) -> Packed:
    """See `reference.quantize_pack`."""
    assert supports(fmt, half)
    b, h, n, d = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    device = x.device
    token = fmt.axis == "token"
    shape = (b, h, n, d // fmt.group) if token else (b, h, n // fmt.group, d)
    groups = shape[2] * shape[3]
    scale = torch.empty(shape, dtype=torch.float16, device=device)
    zero = torch.empty_like(scale) if fmt.has_zero else None
    step = scale if fmt.has_zero else torch.empty(shape, dtype=torch.float32, device=device)
    levels = torch.tensor(fmt.levels or (0.0, 0.0), dtype=torch.float32, device=device)
    bounds = (levels[1:] + levels[:-1]) / 2
    tiles = -(-(lead + n) // 64)
    codes = torch.empty(codes_shape((b, h, tiles * 64, d), fmt.bits, role, 32), dtype=torch.uint8, device=device)
    if n == 0:
        return Packed(codes.zero_(), scale, zero)
    strides = x.stride()[:3]
    size = triton.next_power_of_2(fmt.group)
    many = max(1, min(128, 2048 // size))
    common = dict(BITS=fmt.bits, TOKEN=token, GROUP=fmt.group, KIND=fmt.kind)
    grid = torch.empty_like(step) if fmt.kind == "symmetric" else step
    factors = STEPS if fmt.bits < 8 else STEPS[:1]
    steps = tuple(step_of(fmt.bits) * factor for factor in factors) if fmt.kind == "symmetric" else (1.0,)
    zeros = scale if zero is None else zero
    _scale_kernel[(-(-groups // many), b * h)](
        x, *strides, scale, zeros, step, grid, levels, bounds, h, groups, shape[3],
        SIZE=size, MANY=many, STEPS=steps, UNBIASED=fmt.fit == "unbiased", num_warps=4, **common,
    )  # fmt: skip
    v = value_half(d, 32)
    nibbles = d if role == "keys" else 64
    rows = min(32, triton.next_power_of_2(nibbles * fmt.bits // 4))
    parts = -(-(nibbles * fmt.bits // 4) // rows)
    _pack_kernel[(tiles * parts, b * h, 1 if role == "keys" else d // (2 * v))](
        x, *strides, scale, zeros, step, grid, bounds, codes, h, n, groups, lead, tiles,
        D=d, V=v, KEYS=role == "keys", BLOCK_R=rows, num_warps=4, **common,
    )  # fmt: skip
    return Packed(codes, scale, zero)
