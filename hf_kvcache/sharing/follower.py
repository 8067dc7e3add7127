"""FollowerLayer: the cache of a model layer that keeps nothing and attends over the rows of an earlier one."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..layer import KVLayer, Pending


class FollowerLayer(CacheLayerMixin):
    """A layer that reads the rows of its `source`, which stands before it in the model. Lossy. No bytes.

    Keys and values that the model hands over are not looked at: `update` returns handles of the source's rows, so the
    layer attends over what the source attended to in the same step. The source ends its step when the last of its
    followers has attended; all operations act on the source alone.

    Args:
        source: the layer that holds the rows. It counts this one in `source.followers`.
        layer_idx: index of the model layer.

    Raises `ValueError` from `update` where the source was not given the same tokens in this forward pass.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True

    def __init__(self, source: KVLayer, layer_idx: int) -> None:
        self.source = source
        self.layer_idx = layer_idx
        source.followers += 1

    def _unread(self) -> Pending | None:
        """The step of the source that this layer has not been given yet."""
        pending = self.source.pending
        return None if pending is None or self.layer_idx in pending.given else pending

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, pending = self.source, self._unread()
        if pending is None or pending.rows.length != key_states.shape[2]:
            raise ValueError(
                f"layer {self.layer_idx} shares the keys and values of layer {source.layer_idx}, which was not given "
                f"the {key_states.shape[2]} tokens of this pass: was a forward pass interrupted half-way, or do this "
                "model's layers not run in order? Call `cache.reset()`, or make a cache without `sharing`."
            )
        pending.given.add(self.layer_idx)
        return source.handles(pending)

    def get_seq_length(self) -> int:
        pending = self._unread()
        return self.source.get_seq_length() if pending is None else pending.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        pending = self._unread()
        if pending is None:
            return self.source.get_mask_sizes(query_length)
        return self.source.mask_sizes(pending.held, pending.start, query_length)

    def get_max_length(self) -> int:
        return -1

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.source.is_initialized

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        return self.source.is_sliding

    @property
    def record_past(self) -> bool:
        return self.source.record_past

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """The source's keys (for code that looks into the cache)."""
        return self.source.keys

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.source.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: there are no rows."""

    def reset(self) -> None:
        """Nothing to do, here and below: the source does it, and is a layer of the same cache."""

    def crop(self, tokens_to_remove: int) -> None:
        pass

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        pass

    def batch_repeat_interleave(self, repeats: int) -> None:
        pass

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        pass

    def offload(self) -> None:
        raise NotImplementedError("this layer cannot be offloaded by transformers")

    def prefetch(self) -> None:
        raise NotImplementedError("this layer cannot be offloaded by transformers")
