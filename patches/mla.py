"""Latents handed on to the attention function instead of being expanded to all heads.

Upstream: transformers 5.17.0 to 5.24.0. The attention modules of multi-head latent attention (`expand_kv` in
deepseek_v2, deepseek_v3, glm4_moe_lite, kimi_linear, longcat_flash, minicpm3, mistral4, youtu and others) read the
latents of the whole context from the cache and expand them to keys and values of every head at every step. This gives
chosen modules an `expand_kv` of their own that asks a handler first. It can go when transformers attends to the latents
itself, or lets a model hand them on.

Only the given modules change, and only by two entries of their `__dict__`; `undo` takes them out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_kvcache.attention import ABSORBED as HANDLER


def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    handler = vars(self).get(HANDLER)
    if handler is not None and handler.hands_on(self, kv_nope, k_rot):
        return kv_nope, k_rot
    return type(self).expand_kv(self, kv_nope, k_rot)


def apply(module: nn.Module, handler: Any) -> None:
    """Let `handler.hands_on(module, latent, rope)` decide whether the latents go on as they are."""
    setattr(module, HANDLER, handler)
    # A bound method, not a closure: it follows its module through `copy.deepcopy`. A pickled one expands again.
    module.expand_kv = MethodType(expand_kv, module)  # type: ignore[assignment]


def undo(module: nn.Module) -> None:
    """Take the change back. Does nothing on a module that has none."""
    if HANDLER in vars(module):
        delattr(module, HANDLER)
        delattr(module, "expand_kv")


@contextmanager
def latents_handed_on(modules: Iterable[nn.Module], handler: Any) -> Iterator[None]:
    """`apply` for a while."""
    modules = list(modules)
    for module in modules:
        apply(module, handler)
    try:
        yield
    finally:
        for module in modules:
            undo(module)
