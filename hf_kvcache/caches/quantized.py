"""QuantizedKIVICache: every token, in 2 to 8 bits."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import KVCache
from ..codecs import KIVI


class QuantizedKIVICache(KVCache):
    """Keep every token as integers of 2, 3, 4 or 8 bits. Lossy. KIVI, arXiv 2402.02750.

    The first `num_sink_tokens` and the last `residual_length` tokens are exact, always; a block in between is quantized
    once, from exact rows, when it leaves the window, and attended to as it is packed. Bits per element of a packed row:
    `nbits + 32 / q_group_size`.

    Args:
        model_or_config: the model (it is attached), or its config.
        nbits: width of keys and values, a list with one for each layer, or a mean of two neighbouring widths.
        key_bits, value_bits: the width of one of the two.
        q_group_size: tokens that share a scale of a key channel, and channels that share one of a value.
        residual_length, num_sink_tokens: newest and first tokens that stay exact.
        clipping: `"minmax"` (the paper's), or `"mse"`: the range of least squared error.

    Raises:
        ValueError: widths, groups or head sizes that cannot be packed.
        NotImplementedError: with a policy that overwrites single rows.
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        nbits: float | list[int] = 2,
        key_bits: float | list[int] | None = None,
        value_bits: float | list[int] | None = None,
        q_group_size: int = 32,
        residual_length: int = 128,
        num_sink_tokens: int = 0,
        clipping: str = "minmax",
        scope: str = "full",
        **parts: Any,
    ) -> None:
        if "codec" in parts:
            raise ValueError(f"{type(self).__name__} has its codec; pass a codec of your own to KVCache")
        codec = KIVI(nbits, key_bits, value_bits, q_group_size, residual_length, num_sink_tokens, clipping)
        super().__init__(model_or_config, codec=codec, scope=scope, **parts)

    def arguments(self) -> dict[str, Any]:
        assert self.codec is not None
        return self.codec.describe() | self.policy.describe()
