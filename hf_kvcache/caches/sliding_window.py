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
        move_sinks: rotate sink keys forward as tokens are dropped. False leaves them where they were: attention is then
            that of the full cache with the dropped tokens masked. That serves every model, also those whose positions
            do not count tokens (over images, with M-RoPE), within the length that it was trained on.

    Raises:
        ValueError: sizes that are not positive; a config instead of the model.
        NotImplementedError: with `move_sinks`, models with learned absolute positions, with frequencies that change
            with length, or with positions over images.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        window_length: int,
        num_sink_tokens: int = 4,
        scope: str = "full",
        move_sinks: bool = True,
        **parts: Any,
    ) -> None:
        if "policy" in parts:
            raise ValueError(f"{type(self).__name__} has its policy; pass a policy of your own to KVCache")
        super().__init__(model, policy=SlidingWindow(window_length, num_sink_tokens, move_sinks), scope=scope, **parts)
