"""SnapKVCache: compress a long prompt once, when it has been read."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..cache import KVCache
from ..policies import SnapKV


class SnapKVCache(KVCache):
    """Keep what the end of the prompt looks at. Lossy. SnapKV, arXiv 2404.14469; PyramidKV, arXiv 2406.02069.

    Every prompt (the first, and each later turn's) is cut to `max_capacity_prompt` rows per KV head: its last
    `window_size` tokens and those that their queries attend to most, pooled over neighbours. Prompts no longer than
    the capacity pass through unchanged. Bytes per row and layer: `2 * Hkv * D * bytes(dtype) + 4 * Hkv`.

    Args:
        model: the model.
        max_capacity_prompt: rows per KV head after a prompt (the mean over layers with `pyramid_beta`).
        window_size: observing queries at the end of the prompt; always kept.
        kernel_size, pooling: width and kind (`"avgpool"`, `"maxpool"`, `"ahead"`) of the pooling. The last queries look
            at the row where an answer begins; what follows is kept only if the pooling reaches it. So a single fact is
            found with `"maxpool"` and a kernel of twice its length, or with `"ahead"` and a kernel of its length.
        pyramid_beta: give lower layers more rows and upper layers fewer, by this steepness (PyramidKV uses 20).
        decode_budget: bound the generated tokens too: beyond this many rows each new token replaces the one that the
            current query attends to least. None: generated tokens are all kept.
        num_sink_tokens: first tokens that are always kept.
        group_reduce: `"mean"` or `"max"` over the query heads that share a KV head.
        value_norm: weigh scores by the norm of the value.
        wide_window: let this many last queries observe too; their average is added.
        adaptive_heads, floor_alpha: let the KV heads of a layer share their rows (AdaKV, arXiv 2407.11550), each with
            at least this share of its own. Closer to the full cache at the same bytes; decoding goes head by head.
        recent_ratio: keep at least this share of the capacity for the newest rows.

    The defaults are those of the paper. Better on the models measured so far, at the same bytes: `window_size=16,
    wide_window=128, recent_ratio=0.25, pooling="ahead", kernel_size=7`. With `prefill_chunk_size` every chunk counts as
    a prompt, and is cut by what its own last queries look at.

    Raises:
        ValueError: impossible sizes, an even kernel, a config instead of the model.
        NotImplementedError: models whose attention cannot be routed through this library.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_capacity_prompt: int = 2048,
        window_size: int = 32,
        kernel_size: int = 5,
        pooling: str = "avgpool",
        pyramid_beta: int | None = None,
        decode_budget: int | None = None,
        num_sink_tokens: int = 0,
        group_reduce: str = "mean",
        value_norm: bool = False,
        wide_window: int | None = None,
        recent_ratio: float | None = None,
        adaptive_heads: bool = False,
        floor_alpha: float = 0.2,
        scope: str = "full",
        **parts: Any,
    ) -> None:
        if "policy" in parts:
            raise ValueError(f"{type(self).__name__} has its policy; pass a policy of your own to KVCache")
        policy = SnapKV(
            max_capacity_prompt,
            window_size,
            kernel_size,
            pooling,
            pyramid_beta,
            decode_budget,
            num_sink_tokens,
            group_reduce,
            value_norm,
            wide_window,
            recent_ratio,
            adaptive_heads,
            floor_alpha,
        )
        super().__init__(model, policy=policy, scope=scope, **parts)
