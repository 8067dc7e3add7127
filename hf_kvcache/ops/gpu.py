"""Whether a tensor is one for the Triton kernels."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes(tensor: torch.Tensor) -> bool:
    """True for CUDA tensors where triton is installed, unless HF_KVCACHE_TRITON=0; the others go the plain way."""
    return tensor.is_cuda and has_triton() and os.environ.get("HF_KVCACHE_TRITON") != "0"
