"""Some rows of a packed tensor, by the fastest way this machine has."""

from __future__ import annotations

import torch

from .. import gpu
from ..packed import Format, Packed
from . import reference


def gather_rows(packed: Packed, fmt: Format, role: str, dim: int, index: torch.Tensor, half: int = 32) -> Packed:
    """See `reference.gather_rows`."""
    if gpu.takes(index) and half == 32 and fmt.per_token:
        from . import triton as kernels

        return kernels.gather_rows(packed, fmt, role, dim, index, half)
    return reference.gather_rows(packed, fmt, role, dim, index, half)
