"""Some rows of a packed tensor, by the fastest way this machine has."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ..packed import Format, Packed
from . import reference


def gather_rows(packed: Packed, fmt: Format, role: str, dim: int, index: torch.Tensor, half: int = 32) -> Packed:
    """See `reference.gather_rows`."""
    if index.device.type == "cuda" and half == 32 and fmt.per_token and find_spec("triton") is not None:
        from . import triton

        return triton.gather_rows(packed, fmt, role, dim, index, half)
    return reference.gather_rows(packed, fmt, role, dim, index, half)
