"""Attention of absorbed queries over latent rows, by the fastest way this machine has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import gpu
from ..attention import Block, Extras
from ..decode_attention import PackedRows
from . import cpu

# Rows of one place: exact latents and rotary parts `[B, 1, N, R]`, `[B, 1, N, P]`, or packed ones ("keys" are latents).
Part = tuple[torch.Tensor, torch.Tensor] | PackedRows


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    parts: Sequence[Part],
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    need_probs: bool = False,
    need_lse: bool = False,
) -> Block:
    """See `reference.latent_attention`."""
    arguments = (q_latent, q_rope, parts, extras, visible, bias, need_probs, need_lse)
    needs_gradient = torch.is_grad_enabled() and (q_latent.requires_grad or q_rope.requires_grad)
    if gpu.takes(q_latent) and not needs_gradient:
        from . import triton as kernels

        if kernels.supports(*arguments):
            return kernels.latent_attention(*arguments)
    return cpu.latent_attention(*arguments)
