"""HeavyHitterCache: a hard budget at every step."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..cache import KVCache
from ..policies import HeavyHitter


class HeavyHitterCache(KVCache):
    """Keep the newest rows and those that received the most attention so far. Lossy. H2O, arXiv 2306.14048.

    A hard budget of `heavy + recent` rows per KV head after every step, prompts included; a new token takes the slot
    of the row it evicts. Bytes per row and layer: `2 * Hkv * D * bytes(dtype) + 8 * Hkv`.

    Args:
        model: the model.
        heavy_size, recent_size: rows per KV head (tokens).
        heavy_ratio, recent_ratio: the same as shares of each prompt, in (0, 1]; 0.1 each if nothing is given.
        num_sink_tokens: first tokens that are always kept; they count as heavy.
        score: `"sum"` of attention received (the paper's), or `"mean"` over the queries that could see the row, which
            does not favour old rows and was better on the models measured so far.

    Raises:
        ValueError: impossible sizes, a size and a ratio for the same part, a config instead of the model.
        NotImplementedError: models whose attention cannot be routed through this library.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        heavy_size: int | None = None,
        recent_size: int | None = None,
        heavy_ratio: float | None = None,
        recent_ratio: float | None = None,
        num_sink_tokens: int = 0,
        score: str = "sum",
        scope: str = "full",
        **parts: Any,
    ) -> None:
        if "policy" in parts:
            raise ValueError(f"{type(self).__name__} has its policy; pass a policy of your own to KVCache")
        policy = HeavyHitter(heavy_size, recent_size, heavy_ratio, recent_ratio, num_sink_tokens, score)
        super().__init__(model, policy=policy, scope=scope, **parts)
