"""Packed rows as full numbers, on the GPU: one program for each tile of tokens and block of channels."""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed import Format, Packed, value_half

TILE = 64


@triton.jit
def byte_of(base, row, column, WIDTH: tl.constexpr, inside):
    return tl.load(base + row * WIDTH + column, mask=inside, other=0).to(tl.int32)


@triton.jit
def code_at(base, row, column, high, inside, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of one tile, as int32. See `ops.packed`: `row` of `ROWS` rows of nibbles, `column` of `WIDTH` bytes, and
    whether the code is in the `high` (1) or low (0) nibbles."""
    if BITS == 4:
        return (byte_of(base, row, column, WIDTH, inside) >> (4 * high)) & 15
    elif BITS == 8:
        low = (byte_of(base, row, column, WIDTH, inside) >> (4 * high)) & 15
        return low | ((byte_of(base, row + ROWS, column, WIDTH, inside) >> (4 * high)) & 15) << 4
    else:
        fold = row // (ROWS // 2)
        code = (byte_of(base, row % (ROWS // 2), column, WIDTH, inside) >> (2 * fold + 4 * high)) & 3
        if BITS == 3:
            plane = byte_of(base, ROWS // 2 + row % (ROWS // 4), column, WIDTH, inside)
            code = code | ((plane >> (row // (ROWS // 4) + 4 * high)) & 1) << 2
        return code


@triton.jit(do_not_specialize=["length"])
def _dequantize_kernel(
    codes, c_b, c_h, c_block, c_t, scale, s_b, s_h, s_g, zero, z_b, z_h, z_g, levels, out, heads, length,
    D: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr, KEYS: tl.constexpr, TOKEN: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // heads
    h = bh % heads
    t = tl.arange(0, 64)[:, None]
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    token = tile * 64 + t
    inside = (token < length) & (d < D)
    base = codes + b * c_b + h * c_h + tile * c_t
    if KEYS:
        code = code_at(base, d, t % 32, t // 32, inside, BITS, D, 32)
    else:
        base += d // (2 * V) * c_block
        code = code_at(base, t, d % V, d // V % 2, inside, BITS, 64, V)
    if KIND == "float8":
        bits = ((code & 128) << 8) | ((code & 127) << 7)  # e4m3 as float16, 2**8 too small
        x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif KIND == "codebook":
        x = tl.load(levels + code)
    elif KIND == "symmetric":
        x = code.to(tl.float32) - (2**BITS - 1) / 2
    else:
        x = code.to(tl.float32)
    if TOKEN:
        g = token
        at = d // GROUP
    else:
        g = token // GROUP
        at = d
    x *= tl.load(scale + b * s_b + h * s_h + g * s_g + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "affine":
        x += tl.load(zero + b * z_b + h * z_h + g * z_g + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (bh * length + token) * D + d, x.to(out.dtype.element_ty), mask=inside)


def supports(fmt: Format, half: int) -> bool:
    return half == 32 and (fmt.kind != "float8" or fmt.bits == 8)


def dequantize(packed: Packed, fmt: Format, role: str, dim: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """See `reference.dequantize`."""
    codes, scale = packed.codes, packed.scale
    zero = scale if packed.zero is None else packed.zero
    b, h = codes.shape[:2]
    out = torch.empty(b, h, length, dim, dtype=dtype, device=codes.device)
    if length == 0:
        return out
    levels = torch.tensor(fmt.levels or (0.0,), dtype=torch.float32, device=codes.device)
    strides = codes.stride()
    block_stride, tile_stride = (0, strides[2]) if role == "keys" else (strides[2], strides[3])
    block_d = min(64, triton.next_power_of_2(dim))
    grid = (-(-length // TILE), b * h, -(-dim // block_d))
    _dequantize_kernel[grid](
        codes, strides[0], strides[1], block_stride, tile_stride, scale, *scale.stride()[:3], zero, *zero.stride()[:3],
        levels, out, h, length,
        D=dim, V=value_half(dim, 32), BITS=fmt.bits, KEYS=role == "keys", TOKEN=fmt.axis == "token", GROUP=fmt.group,
        KIND=fmt.kind, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return out
