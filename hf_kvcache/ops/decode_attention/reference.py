"""The two halves of attention over packed rows, by unpacking a page at a time. Plain torch, every device and format."""

from __future__ import annotations

import math

import torch

from ..dequantize import dequantize
from ..packed import Format, Packed

PAGE = 2048  # tokens that are full numbers at one time


def page_size(half: int, *formats: Format) -> int:
    """Tokens of a page: whole tiles, and whole groups of tokens that share a scale."""
    unit = math.lcm(2 * half, *(fmt.group for fmt in formats if fmt.axis == "channel"))
    return max(1, PAGE // unit) * unit


def _page(packed: Packed, fmt: Format, role: str, start: int, stop: int, half: int) -> Packed:
    tiles = slice(start // (2 * half), -(-stop // (2 * half)))
    codes = packed.codes[:, :, tiles] if role == "keys" else packed.codes[:, :, :, tiles]
    step = fmt.group if fmt.axis == "channel" else 1
    groups = slice(start // step, -(-stop // step))
    zero = None if packed.zero is None else packed.zero[:, :, groups]
    return Packed(codes, packed.scale[:, :, groups], zero)


def packed_logits(query: torch.Tensor, keys: Packed, fmt: Format, length: int, half: int) -> torch.Tensor:
    """Products of queries `[B, H, M, D]` with the first `length` packed keys: float32 `[B, H, M, length]`."""
    dim = query.shape[-1]
    pages = []
    size = page_size(half, fmt)
    for start in range(0, length, size):
        stop = min(start + size, length)
        page = _page(keys, fmt, "keys", start, stop, half)
        rows = dequantize(page, fmt, "keys", dim, stop - start, torch.float32)
        pages.append(torch.matmul(query.float(), rows.transpose(-1, -2)))
    return torch.cat(pages, dim=-1)


def packed_weighted(probs: torch.Tensor, values: Packed, fmt: Format, dim: int, half: int) -> torch.Tensor:
    """Sums of packed values weighted by `probs` `[B, H, M, N]`: float32 `[B, H, M, dim]`."""
    length = probs.shape[-1]
    total = probs.new_zeros(*probs.shape[:3], dim, dtype=torch.float32)
    size = page_size(half, fmt)
    for start in range(0, length, size):
        stop = min(start + size, length)
        page = _page(values, fmt, "values", start, stop, half)
        rows = dequantize(page, fmt, "values", dim, stop - start, torch.float32)
        total = total + torch.matmul(probs[..., start:stop].float(), rows)
    return total
