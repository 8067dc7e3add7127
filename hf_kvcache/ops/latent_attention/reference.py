"""Attention over latents, written out: one key `[latent | rotary part]` for all heads, and the latent as its value.

Plain torch, every device, dtype and format. The whole key exists once for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..attention import Block, Extras, attend
from ..decode_attention import PackedRows
from ..decode_attention.reference import _page
from ..dequantize import dequantize

if TYPE_CHECKING:
    from .dispatch import Part


def decoded(rows: PackedRows, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows `start:stop` (whole tiles first) as latents and rotary parts `[B, 1, N, R | P]` in float32."""
    pair = []
    for packed, fmt, role, turn in (
        (rows.keys, rows.key_format, "keys", rows.key_turn),
        (rows.values, rows.value_format, "values", rows.value_turn),
    ):
        page = _page(packed, fmt, role, start, stop, rows.half)
        dim = _dim_of(page.codes, fmt.bits, role)
        x = dequantize(page, fmt, role, dim, stop - start, torch.float32)
        pair.append(x if turn is None else torch.matmul(x, turn.float().transpose(-1, -2)))
    latent, rope = pair
    if rows.key_mean is not None:
        latent = latent + rows.key_mean.float()[:, :, None]
    return latent, rope


def _dim_of(codes: torch.Tensor, bits: int, role: str) -> int:
    return codes.shape[3] * 4 // bits if role == "keys" else codes.shape[2] * 2 * codes.shape[5]


def latent_attention(
    q_latent: torch.Tensor,  # [B, H, Q, R]
    q_rope: torch.Tensor,  # [B, H, Q, P]
    parts: Sequence[Part],  # rows in order
    extras: Extras,
    visible: torch.Tensor | None = None,  # bool, broadcastable to [B, 1, Q, N]
    bias: torch.Tensor | None = None,  # additive, broadcastable to [B, H, Q, N]
    need_probs: bool = False,
    need_lse: bool = False,
) -> Block:
    """Output `[B, H, Q, R]`, and the log-sum-exp and probabilities where asked for."""
    pairs = [decoded(part, 0, part.length) if isinstance(part, PackedRows) else part for part in parts]
    latent = torch.cat([latent.to(q_latent.dtype) for latent, _ in pairs], dim=2)
    rope = torch.cat([rope.to(q_rope.dtype) for _, rope in pairs], dim=2)
    query, keys = torch.cat([q_latent, q_rope], dim=-1), torch.cat([latent, rope], dim=-1)
    return attend(query, keys, latent, extras, visible, bias, need_probs=need_probs, need_lse=need_lse)
