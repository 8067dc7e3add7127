"""Packed tensors: how quantized keys and values lie in memory, on every device.

A tensor `[B, H, N, D]` (N tokens, D channels) becomes integer codes of `bits` bits and a scale (and zero) for each
group:

    x = scale * level(code) + zero

Tokens lie in tiles of `2 * half` (64 unless the CPU asks for 32). Codes that meet in one byte come from the two halves
of a tile, so a kernel that masks and shifts gets whole vectors, and the bytes of the 4-bit layout are those that
torch's CPU int4 matmul reads:

- keys (the product with a query runs over channels): `codes [B, H, tiles, D * bits / 4, half]`. In 4 bits, row `d`
  holds channel `d`, low nibbles the tokens `i < half` of the tile and high nibbles the tokens `half + i`.
- values (the product with probabilities runs over tokens): `codes [B, H, D / (2 v), tiles, bits * half / 2, v]` where
  `v` is half the width of a block of channels. In 4 bits, row `t` holds token `t`, low nibbles the channels `i < v` of
  the block and high nibbles the channels `v + i`.

Other widths fold rows into the bits of a nibble. Of R rows of nibbles,
- 2 bits: row `r < R/2` holds row `r` in bits 0-1 (and 4-5), row `r + R/2` in bits 2-3 (and 6-7);
- 3 bits: R/2 rows as for 2 bits with the low bits, then R/4 rows with the high bits: row `r + j R/4` in bit j
  (and j + 4);
- 8 bits: R rows of low nibbles, then R rows of high nibbles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Format:
    """How one tensor is written.

    Attributes:
        bits: 2, 3, 4 or 8.
        axis: `"channel"`, a scale for each channel over `group` tokens; `"token"`, a scale for each token over `group`
            channels.
        group: elements that share a scale.
        kind: `"affine"` (level = code, with a zero), `"symmetric"` (level = code - (2**bits - 1) / 2, no zero),
            `"codebook"` (level = `levels[code]`, no zero) or `"float8"` (e4m3 numbers, no zero).
        levels: the codebook.
        fit: how scales are chosen: `"minmax"` or `"mse"` (a search over clipped ranges) for affine and float8;
            `"unbiased"` (the length of a vector along itself is kept) or `"mse"` for the others.
        scale_bits: 16 (float16), or 8: steps of 1/24 octave below a float32 base for each head. For formats with a
            scale per token and no zero.
    """

    bits: int
    axis: str
    group: int
    kind: str = "affine"
    levels: tuple[float, ...] | None = None
    fit: str = "minmax"
    scale_bits: int = 16

    @property
    def has_zero(self) -> bool:
        return self.kind == "affine"

    @property
    def per_token(self) -> bool:
        """Whether every row is complete in itself, so that rows can be moved and overwritten."""
        return self.axis == "token"

    def bits_per_element(self) -> float:
        """Codes, scales and zeros."""
        return self.bits + (32 if self.has_zero else self.scale_bits) / self.group


class Packed(NamedTuple):
    """One packed tensor. `scale` and `zero` (or None) are float16: `[B, H, N / group, D]` or `[B, H, N, D / group]`."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


def code_rows(nibble_rows: int, bits: int) -> int:
    """Rows of bytes that hold `nibble_rows` rows of codes."""
    return nibble_rows * bits // 4


def value_half(dim: int, half: int) -> int:
    """Half the width of a block of value channels: `half` where it fits, or the largest power of two that does."""
    while dim % (2 * half):
        half //= 2
    return half


def codes_shape(shape: tuple[int, int, int, int], bits: int, role: str, half: int) -> tuple[int, ...]:
    """Shape of the codes of a tensor `[B, H, N, D]`, N a multiple of the tile."""
    b, h, n, d = shape
    tiles = n // (2 * half)
    if role == "keys":
        return b, h, tiles, code_rows(d, bits), half
    v = value_half(d, half)
    return b, h, d // (2 * v), tiles, code_rows(2 * half, bits), v


def scales_shape(slots: int, dim: int, fmt: Format) -> tuple[int, int]:
    """Shape of the scales (and zeros) of each head: groups of tokens and channels, or tokens and groups of channels."""
    return (-(-slots // fmt.group), dim) if fmt.axis == "channel" else (slots, dim // fmt.group)


def pack_codes(codes: torch.Tensor, bits: int, role: str, half: int) -> torch.Tensor:
    """Codes `[B, H, N, D]` (uint8, N a multiple of the tile) as bytes."""
    return _fold(_tiled(codes, role, half), bits)


def unpack_codes(packed: torch.Tensor, bits: int, role: str, dim: int) -> torch.Tensor:
    """The reverse of `pack_codes`: uint8 `[B, H, N, D]`."""
    low, high = _unfold(packed, bits)
    if role == "keys":
        b, h, tiles, _, half = packed.shape
        both = torch.stack([low, high], dim=4)  # [B, H, tiles, D, 2, half]
        return both.permute(0, 1, 2, 4, 5, 3).reshape(b, h, tiles * 2 * half, dim)
    b, h, blocks, tiles, _, v = packed.shape
    both = torch.stack([low, high], dim=5)  # [B, H, blocks, tiles, 2 half, 2, v]
    return both.permute(0, 1, 3, 4, 2, 5, 6).reshape(b, h, -1, dim)


def _tiled(codes: torch.Tensor, role: str, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of low and of high nibbles, in rows."""
    b, h, n, d = codes.shape
    tiles = n // (2 * half)
    if role == "keys":
        both = codes.view(b, h, tiles, 2, half, d).permute(3, 0, 1, 2, 5, 4)  # [2, B, H, tiles, D, half]
    else:
        v = value_half(d, half)
        both = codes.view(b, h, tiles, 2 * half, d // (2 * v), 2, v).permute(5, 0, 1, 4, 2, 3, 6)
    return both[0].contiguous(), both[1].contiguous()


def _fold(nibbles: tuple[torch.Tensor, torch.Tensor], bits: int) -> torch.Tensor:
    """Rows of codes (dimension -2) as bytes."""
    low, high = nibbles
    if bits == 8:
        return torch.cat([(low & 15) | (high << 4), (low >> 4) | (high & 240)], dim=-2)
    byte = low | (high << 4)
    if bits == 4:
        return byte
    rows = byte.shape[-2]
    two = byte & 0x33
    folded = two[..., : rows // 2, :] | (two[..., rows // 2 :, :] << 2)
    if bits == 2:
        return folded
    top = (byte >> 2) & 0x11
    quarters = top.unflatten(-2, (4, rows // 4))
    plane = quarters[..., 0, :, :]
    for j in range(1, 4):
        plane = plane | (quarters[..., j, :, :] << j)
    return torch.cat([folded, plane], dim=-2)


def nibbles(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes of 2- or 3-bit codes as rows of 4-bit ones (values 0-3 or 0-7). The others are returned as they are."""
    if bits in (4, 8):
        return packed
    rows = packed.shape[-2] * 4 // bits
    out = packed.new_empty(*packed.shape[:-2], rows, packed.shape[-1])
    two = packed[..., : rows // 2, :]
    torch.bitwise_and(two, 0x33, out=out[..., : rows // 2, :])
    upper = out[..., rows // 2 :, :]
    torch.bitwise_right_shift(two, 2, out=upper)
    upper &= 0x33
    if bits == 3:
        plane = packed[..., rows // 2 :, :]
        quarters = out.unflatten(-2, (4, rows // 4))
        for j in range(4):
            quarters[..., j, :, :] |= ((plane >> j) & 0x11) << 2
    return out


def _unfold(packed: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    if bits == 8:
        rows = packed.shape[-2] // 2
        lower, upper = packed[..., :rows, :], packed[..., rows:, :]
        return (lower & 15) | (upper << 4), (lower >> 4) | (upper & 240)
    byte = nibbles(packed, bits)
    return byte & 15, byte >> 4


# A step of an 8-bit scale: 1/24 of an octave, in units of the last place of a float32.
SCALE_STEP = 2**23 // 24


def log_scale(scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Scales as uint8: how many steps below `base` (broadcastable). 24 steps halve it, evenly within each octave."""
    below = base.float().view(torch.int32) - scale.float().view(torch.int32)
    return (below.double() / SCALE_STEP).round().clamp(0, 255).to(torch.uint8)


def linear_scale(code: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The reverse of `log_scale`, float32 (float16 on a GPU). One pass over integers: it is done at every step.

    `base` is float32, and must be positive also where no row is held.
    """
    scale = torch.sub(base.view(torch.int32), code, alpha=SCALE_STEP).view(torch.float32)
    return scale.half() if scale.is_cuda else scale


# Steps of the uniform quantizer with the least squared error on a unit Gaussian.
_STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352, 8: 0.0308}


def step_of(bits: int) -> float:
    """Step of the best uniform symmetric quantizer of `bits` bits for a unit Gaussian."""
    return _STEPS[bits]
