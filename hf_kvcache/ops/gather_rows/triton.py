"""Some rows of a packed tensor on the GPU, without unpacking: bits move from byte to byte.

A key lies in one column of its tile, in the low or the high nibbles; what a row of the tile means is the same for every
key, so nibbles move as they are, whatever the width. A value lies in rows: whole ones of 4 and 8 bits, pairs of bits of
narrower codes.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed import Format, Packed, codes_shape, value_half
from .reference import gather_scales


@triton.jit(do_not_specialize=["count", "tiles"])
def _keys_kernel(codes, c_b, c_h, c_t, index, out, heads, count, tiles, BYTES: tl.constexpr, BLOCK_R: tl.constexpr):
    """`[BLOCK_R, 32]` bytes of one tile. Grid: (tiles, B * H, blocks of rows)."""
    tile = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    i = tl.arange(0, 32)
    codes += (bh // heads) * c_b + (bh % heads) * c_h
    byte = tl.zeros([BLOCK_R, 32], tl.int32)
    for high in tl.static_range(2):
        place = tile * 64 + 32 * high + i
        source = tl.load(index + bh * count + place, mask=place < count, other=0)
        inside = (place < count)[None, :] & (row < BYTES)
        x = tl.load(codes + (source // 64 * c_t + source % 32)[None, :] + row * 32, mask=inside, other=0).to(tl.int32)
        shift = (source % 64 // 32 * 4).to(tl.int32)[None, :]
        byte = byte | ((x >> shift) & 15) << (4 * high)
    tl.store(out + (bh * tiles + tile) * (BYTES * 32) + row * 32 + i[None, :], byte.to(tl.uint8), mask=row < BYTES)


@triton.jit
def _plane(
    codes, c_t, index, out, bh, count, tile, V: tl.constexpr, FIRST: tl.constexpr, FOLDS: tl.constexpr
):  # fmt: skip
    """Rows from FIRST on, which FOLDS sets of tokens share: each has 4 / FOLDS bits of both nibbles."""
    WIDTH: tl.constexpr = 4 // FOLDS
    ROWS: tl.constexpr = 64 // FOLDS
    MASK: tl.constexpr = ((1 << WIDTH) - 1) * 17
    column = tl.arange(0, V)[None, :]
    r = tl.arange(0, ROWS)
    byte = tl.zeros([ROWS, V], tl.int32)
    for fold in tl.static_range(FOLDS):
        place = tile * 64 + fold * ROWS + r
        source = tl.load(index + bh * count + place, mask=place < count, other=0)
        at = source // 64 * c_t + (FIRST + source % ROWS) * V
        x = tl.load(codes + at[:, None] + column, mask=(place < count)[:, None], other=0).to(tl.int32)
        shift = (source % 64 // ROWS * WIDTH).to(tl.int32)[:, None]
        byte = byte | ((x >> shift) & MASK) << (WIDTH * fold)
    tl.store(out + (FIRST + r)[:, None] * V + column, byte.to(tl.uint8))


@triton.jit(do_not_specialize=["count", "tiles"])
def _values_kernel(codes, c_b, c_h, c_block, c_t, index, out, heads, count, tiles, V: tl.constexpr, BITS: tl.constexpr):
    """All bytes of one tile of one block of channels. Grid: (tiles, B * H, blocks)."""
    tile = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    codes += (bh // heads) * c_b + (bh % heads) * c_h + block * c_block
    out += ((bh * tl.num_programs(2) + block) * tiles + tile) * (16 * BITS * V)
    _plane(codes, c_t, index, out, bh, count, tile, V, 0, 1 if BITS == 4 or BITS == 8 else 2)
    if BITS == 8:
        _plane(codes, c_t, index, out, bh, count, tile, V, 64, 1)
    elif BITS == 3:
        _plane(codes, c_t, index, out, bh, count, tile, V, 32, 4)


def gather_rows(packed: Packed, fmt: Format, role: str, dim: int, index: torch.Tensor, half: int = 32) -> Packed:
    """See `reference.gather_rows`."""
    assert half == 32 and fmt.per_token
    codes = packed.codes
    b, h, count = index.shape
    index = index.contiguous()
    tiles = -(-count // 64)
    out = torch.empty(codes_shape((b, h, tiles * 64, dim), fmt.bits, role, 32), dtype=torch.uint8, device=codes.device)
    strides = codes.stride()
    if tiles and role == "keys":
        rows = dim * fmt.bits // 4
        block = min(64, triton.next_power_of_2(rows))
        _keys_kernel[(tiles, b * h, -(-rows // block))](
            codes, *strides[:3], index, out, h, count, tiles, BYTES=rows, BLOCK_R=block, num_warps=4
        )
    elif tiles:
        v = value_half(dim, 32)
        _values_kernel[(tiles, b * h, dim // (2 * v))](
            codes, *strides[:4], index, out, h, count, tiles, V=v, BITS=fmt.bits, num_warps=4
        )
    return Packed(out, *gather_scales(packed, index))
