"""Packed rows as full numbers. Plain torch, every device."""

from __future__ import annotations

import torch

from ..packed import Format, Packed, unpack_codes


def levels(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes (uint8) as float32 numbers, before scale and zero."""
    if fmt.kind == "float8":
        return codes.view(torch.float8_e4m3fn).float()
    if fmt.kind == "symmetric":
        return codes.float() - (2**fmt.bits - 1) / 2
    if fmt.kind == "codebook":
        assert fmt.levels is not None
        return torch.tensor(fmt.levels, dtype=torch.float32, device=codes.device)[codes.int()]
    return codes.float()


def dequantize(packed: Packed, fmt: Format, role: str, dim: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The first `length` rows `[B, H, length, dim]` in `dtype`."""
    codes = unpack_codes(packed.codes, fmt.bits, role, dim)[:, :, :length]
    b, h = codes.shape[:2]
    x = levels(codes, fmt)
    scale, zero = packed.scale.float(), None if packed.zero is None else packed.zero.float()
    if fmt.axis == "channel":
        groups = -(-length // fmt.group)
        missing = groups * fmt.group - length
        x = torch.nn.functional.pad(x, (0, 0, 0, missing)).view(b, h, groups, fmt.group, dim)
        x = x * scale[:, :, :groups, None]
        if zero is not None:
            x = x + zero[:, :, :groups, None]
        x = x.flatten(2, 3)[:, :, :length]
    else:
        x = x.view(b, h, length, dim // fmt.group, fmt.group) * scale[:, :, :length, :, None]
        if zero is not None:
            x = x + zero[:, :, :length, :, None]
        x = x.flatten(3)
    return x.to(dtype)
