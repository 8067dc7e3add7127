"""Quantize exact rows and pack their codes, by the fastest way this machine has."""

from __future__ import annotations

import torch

from .. import gpu
from ..packed import Format, Packed
from . import reference


def quantize_pack(x: torch.Tensor, fmt: Format, role: str, half: int = 32, lead: int = 0) -> Packed:
    """See `reference.quantize_pack`."""
    if gpu.takes(x):
        from . import triton as kernels

        if kernels.supports(fmt, half):
            return kernels.quantize_pack(x, fmt, role, half, lead)
    return reference.quantize_pack(x, fmt, role, half, lead)
