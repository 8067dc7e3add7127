"""KIVI: asymmetric integers, keys per channel and values per token (arXiv 2402.02750)."""

from __future__ import annotations

from ..ops.packed import Format
from .base import LayerCodec, WidthCodec, channel_group, check_dim, check_positive


class KIVI(WidthCodec):
    """Integers of 2, 3, 4 or 8 bits with a float16 scale and zero for each group. Lossy beyond the exact window.

    Keys share a scale per channel over `q_group_size` tokens, values per token over `q_group_size` channels (the
    nearest divisor of the head size). Bits per element: `nbits + 32 / q_group_size`; bytes per token and layer, beyond
    the exact
    window: `Hkv * (D * bits_k + D * bits_v) / 8` and 4 for the position.

    Args:
        nbits: 2, 3, 4 or 8; a list with one width for each layer; or a mean, as 2.5, which alternates two widths.
        key_bits, value_bits: the same for one of the two.
        q_group_size: elements that share a scale.
        residual_length: newest tokens that stay exact.
        num_sink_tokens: first tokens that stay exact.
        clipping: `"minmax"` (the paper's), or `"mse"`: the range of least squared error, found by search.

    Raises `ValueError` for widths, groups or head sizes that cannot be packed.
    """

    name = "KIVI"

    def __init__(
        self,
        nbits: float | list[int] = 2,
        key_bits: float | list[int] | None = None,
        value_bits: float | list[int] | None = None,
        q_group_size: int = 32,
        residual_length: int = 128,
        num_sink_tokens: int = 0,
        clipping: str = "minmax",
    ) -> None:
        super().__init__(nbits, key_bits, value_bits, residual_length, num_sink_tokens)
        check_positive("q_group_size", q_group_size)
        if q_group_size % 8 or q_group_size > 512:
            raise ValueError(f"`q_group_size` must be a multiple of 8, at most 512, got {q_group_size}")
        if clipping not in ("minmax", "mse"):
            raise ValueError(f"`clipping` must be 'minmax' or 'mse', got {clipping!r}")
        self.q_group_size = q_group_size
        self.clipping = clipping

    @property
    def per_token(self) -> bool:
        return False

    def for_layer(self, layer: int, layers: int, key_dim: int, value_dim: int) -> LayerCodec:
        check_dim(key_dim, "keys")
        check_dim(value_dim, "values")
        keys, values = self.widths(layer, layers)
        return LayerCodec(
            Format(keys, "channel", self.q_group_size, fit=self.clipping),
            Format(values, "token", channel_group(value_dim, self.q_group_size), fit=self.clipping),
            self.residual_length,
            self.num_sink_tokens,
        )
