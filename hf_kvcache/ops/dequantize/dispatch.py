"""Packed rows as full numbers, by the fastest way this machine has."""

from __future__ import annotations

import torch

from .. import gpu
from ..packed import Format, Packed
from . import reference


def dequantize(packed: Packed, fmt: Format, role: str, dim: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """See `reference.dequantize`."""
    if gpu.takes(packed.codes):
        from . import triton as kernels

        if kernels.supports(fmt, packed.codes.shape[-1] if role == "keys" else 32):
            return kernels.dequantize(packed, fmt, role, dim, length, dtype)
    return reference.dequantize(packed, fmt, role, dim, length, dtype)
