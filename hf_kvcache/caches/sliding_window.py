"""SlidingWindowCache: endless streams in constant memory."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..cache import KVCache
from ..policies import SlidingWindow


class SlidingWindowCache(KVCache):
    """Keep the first `num_sink_tokens` tokens and the last `window_length`. Lossy. StreamingLLM, arXiv 2309.17453.

    A stream may run past the length the model was trained on: sink keys are rotated forward, so that no query ever
    meets a distance larger than `num_sink_tokens + window_length`. Bytes per token held and layer:
    `2 * Hkv * D * bytes(dtype) + 4`; at most `num_sink_tokens + window_length + 1` tokens.

    Args:
        model: the model; two to four one-token passes find out how its keys depend on position.
        window_length: newest tokens kept.
        num_sink_tokens: first tokens kept (0 is a plain window, which breaks most models).

    Raises:
        ValueError: sizes that are not positive; a config instead of the model.
        NotImplementedError: models with learned absolute positions or with frequencies that change with length.
    """

    def __init__(
        self, model: PreTrainedModel, window_length: int, num_sink_tokens: int = 4, scope: str = "full", **parts: Any
    ) -> None:
        if "policy" in parts:
            raise ValueError(f"{type(self).__name__} has its policy; pass a policy of your own to KVCache")
        super().__init__(model, policy=SlidingWindow(window_length, num_sink_tokens), scope=scope, **parts)
