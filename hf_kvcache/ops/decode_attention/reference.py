"""The two halves of attention over packed rows, by unpacking a page at a time. Plain torch, every device and format."""

from __future__ import annotations

import torch

from ..dequantize import dequantize
from ..packed import Format, Packed

PAGE = 2048  # tokens that are full numbers at one time


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
    for start in range(0, length, PAGE):
        stop = min(start + PAGE, length)
        page = _page(keys, fmt, "keys", start, stop, half)
        rows = dequantize(page, fmt, "keys", dim, stop - start, torch.float32)
        pages.append(torch.matmul(query.float(), rows.transpose(-1, -2)))
    return torch.cat(pages, dim=-1)


def packed_weighted(probs: torch.Tensor, values: Packed, fmt: Format, dim: int, half: int) -> torch.Tensor:
    """Sums of packed values weighted by `probs` `[B, H, M, N]`: float32 `[B, H, M, dim]`."""
    length = probs.shape[-1]
    total = probs.new_zeros(*probs.shape[:3], dim, dtype=torch.float32)
    for start in range(0, length, PAGE):
        stop = min(start + PAGE, length)
        page = _page(values, fmt, "values", start, stop, half)
        rows = dequantize(page, fmt, "values", dim, stop - start, torch.float32)
        total = total + torch.matmul(probs[..., start:stop].float(), rows)
    return total
