"""Column sums of an attention matrix, by the fastest way this machine has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import gpu
from ..attention.reference import Extras
from . import reference


def column_sums(
    query: torch.Tensor,
    keys: torch.Tensor,
    extras: Extras,
    visible: Callable[[int, int], torch.Tensor | None],
    bias: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
    real: torch.Tensor | None = None,
    reduce: str = "mean",
    front: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.column_sums`."""
    if gpu.takes(query):
        from . import triton as kernels

        return kernels.column_sums(query, keys, extras, visible, bias, real, reduce, front)
    return reference.column_sums(query, keys, extras, visible, bias, real, reduce, front)
