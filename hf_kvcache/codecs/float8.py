"""Float8: eight-bit floating point numbers (e4m3)."""

from __future__ import annotations

from ..ops.packed import Format
from .base import Codec, LayerCodec, check_dim, check_positive


class Float8(Codec):
    """Numbers of 8 bits (e4m3): keys with a scale per channel over `q_group_size` tokens, values with one per token.

    Keys are coded around their mean, so that large key biases cost no accuracy. Lossy beyond the exact window, by about
    3% of each number. Bits per element: 8 + (16 / q_group_size + 16 / D) / 2.

    Args:
        q_group_size: tokens that share a scale of a key channel.
        residual_length: newest tokens that stay exact.
        num_sink_tokens: first tokens that stay exact.
    """

    name = "float8"

    def __init__(self, q_group_size: int = 64, residual_length: int = 128, num_sink_tokens: int = 0) -> None:
        super().__init__(residual_length, num_sink_tokens)
        check_positive("q_group_size", q_group_size)
        if q_group_size % 8 or q_group_size > 512:
            raise ValueError(f"`q_group_size` must be a multiple of 8, at most 512, got {q_group_size}")
        self.q_group_size = q_group_size

    @property
    def per_token(self) -> bool:
        return False

    def for_layer(self, layer: int, layers: int, key_dim: int, value_dim: int) -> LayerCodec:
        check_dim(key_dim, "keys")
        check_dim(value_dim, "values")
        return LayerCodec(
            Format(8, "channel", self.q_group_size, "float8"),
            Format(8, "token", value_dim, "float8"),
            self.residual_length,
            self.num_sink_tokens,
            centre_keys=True,
        )
