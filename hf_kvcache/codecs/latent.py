"""Latent: the rows of multi-head latent attention, latents in few bits and their rotary parts in more."""

from __future__ import annotations

from typing import Any

from .rotated import Rotated


class Latent(Rotated):
    """Turned codes with one scale for each row (see `Rotated`), of `nbits` bits for latents. Lossy beyond the window.

    A model with multi-head latent attention (MLA) caches one latent of `R` numbers for all heads, which is both key and
    value, and one rotary part of `P` numbers, which alone carries position: it is written more finely. Bytes per
    token and layer, beyond the exact window: `(R * nbits + P * rope_bits) / 8`, 2 for scales and 4 for the position;
    with 4 and 8 bits 326 of 1,152 in bfloat16 for R = 512 and P = 64.

    Args:
        nbits: bits of a latent's numbers: 2, 3, 4 or 8; a list with one width for each layer; or a mean, as 3.5.
        rope_bits: the same for rotary parts.
        residual_length: newest tokens that stay exact.
        num_sink_tokens: first tokens that stay exact.
        levels: `"uniform"` or `"lloyd-max"` (2 to 4 bits).
        scale_bits: 8 (steps of 1/24 octave) or 16.

    Raises `ValueError` for widths or sizes that cannot be packed, and for models without latents.
    """

    name = "latent"
    for_latents = True

    def __init__(
        self,
        nbits: float | list[int] = 4,
        rope_bits: float | list[int] = 8,
        residual_length: int = 128,
        num_sink_tokens: int = 4,
        levels: str = "uniform",
        scale_bits: int = 8,
    ) -> None:
        super().__init__(nbits, None, rope_bits, residual_length, num_sink_tokens, levels, scale_bits)
        self.rope_bits = rope_bits

    def describe(self) -> dict[str, Any]:
        own = super().describe()
        return {name: value for name, value in own.items() if name not in ("key_bits", "value_bits")}
