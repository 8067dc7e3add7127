"""Rotated: rows turned by a random Hadamard matrix, one scale each (TurboQuant family, arXiv 2504.19874)."""

from __future__ import annotations

from ..ops.packed import Format
from .base import LayerCodec, WidthCodec, check_dim, turn_of

# Lloyd-Max levels of a unit Gaussian, upper halves (Max, 1960).
_UPPER = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


def lloyd_max(bits: int) -> tuple[float, ...]:
    """Levels of least squared error for a unit Gaussian."""
    upper = _UPPER[bits]
    return tuple(-x for x in reversed(upper)) + upper


class Rotated(WidthCodec):
    """Codes of a turned row around the mean, one scale per row. Lossy beyond the exact window.

    Keys are coded around their mean (per channel, of the rows at hand when the first block is written), which also
    takes large key biases away. Rows are complete in themselves, so policies can move and overwrite them. Bits per
    element: `nbits + scale_bits / D`; bytes per token and layer, beyond the exact window: `Hkv * 2 D * bits / 8` and 4
    for the position.

    Args:
        nbits: 2, 3, 4 or 8; a list with one width for each layer; or a mean, as 2.5, which alternates two widths.
        key_bits, value_bits: the same for one of the two.
        residual_length: newest tokens that stay exact.
        num_sink_tokens: first tokens that stay exact.
        levels: `"uniform"`, with the step that fits each row best, or `"lloyd-max"` (2 to 4 bits).
        scale_bits: 8 (steps of 1/24 octave) or 16.

    Raises `ValueError` for widths or head sizes that cannot be packed.
    """

    name = "rotated"

    def __init__(
        self,
        nbits: float | list[int] = 4,
        key_bits: float | list[int] | None = None,
        value_bits: float | list[int] | None = None,
        residual_length: int = 128,
        num_sink_tokens: int = 4,
        levels: str = "uniform",
        scale_bits: int = 8,
    ) -> None:
        super().__init__(nbits, key_bits, value_bits, residual_length, num_sink_tokens)
        if levels not in ("uniform", "lloyd-max"):
            raise ValueError(f"`levels` must be 'uniform' or 'lloyd-max', got {levels!r}")
        if scale_bits not in (8, 16):
            raise ValueError(f"`scale_bits` must be 8 or 16, got {scale_bits!r}")
        self.scale_bits = scale_bits
        self.levels = levels

    @property
    def per_token(self) -> bool:
        return True

    def _format(self, bits: int, dim: int) -> Format:
        if self.levels == "uniform" or bits == 8:
            return Format(bits, "token", dim, "symmetric", fit="unbiased", scale_bits=self.scale_bits)
        return Format(bits, "token", dim, "codebook", lloyd_max(bits), "unbiased", self.scale_bits)

    def for_layer(self, layer: int, layers: int, key_dim: int, value_dim: int) -> LayerCodec:
        check_dim(key_dim, "keys")
        check_dim(value_dim, "values")
        keys, values = self.widths(layer, layers)
        return LayerCodec(
            self._format(keys, key_dim),
            self._format(values, value_dim),
            self.residual_length,
            self.num_sink_tokens,
            centre_keys=True,
            key_turn=turn_of(key_dim, 0),
            value_turn=turn_of(value_dim, 1),
        )
