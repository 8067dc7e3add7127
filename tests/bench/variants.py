"""Selections that are tried out here before they become options of a policy.

`Ahead` is SnapKV with these changes:

- Pooling looks ahead: a row takes the largest score of itself and the `ahead` rows *before* it. What follows a row that
  is attended to is what the model reads next when it copies, and a centred kernel spends half of its reach on the
  other side.
- The rows that are always kept, the last `recent_share` of the capacity, are no longer the same number as the
  observing queries: few queries observe (they know the question), many recent rows stay (text needs them).
- With `wide_weight` the last `wide` queries observe too: the mean over the window plus this weight times theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_kvcache import KVCache
from hf_kvcache.policies.base import LayerPolicy, Step, first_tokens
from hf_kvcache.policies.heavy_hitter import attention_sums
from hf_kvcache.policies.snapkv import SnapKV, SnapKVLayer, _window


class Ahead(SnapKV):
    """SnapKV that pools ahead and keeps a share of its rows for recent tokens. See the module."""

    def __init__(
        self,
        max_capacity_prompt: int,
        window_size: int = 32,
        ahead: int = 6,
        recent_share: float = 0.25,
        wide: int = 128,
        wide_weight: float = 0.0,
        **rest: Any,
    ) -> None:
        super().__init__(max_capacity_prompt, window_size, **rest)
        self.ahead = ahead
        self.recent = max(window_size, int(recent_share * max_capacity_prompt))
        self.wide = wide
        self.wide_weight = wide_weight

    def for_layer(self, layer: int, layers: int, window: int | None) -> LayerPolicy:
        return AheadLayer(self, self.capacity(layer, layers))


class AheadLayer(SnapKVLayer):
    policy: Ahead

    def _value(self, step: Step) -> torch.Tensor:
        if not step.prompt:
            return super()._value(step)
        p, positions, heads = self.policy, step.rows.positions, step.rows.keys.shape[1]
        score = attention_sums(_window(step, p.window_size), heads, p.group_reduce)
        if p.wide_weight:
            wide = attention_sums(_window(step, p.wide), heads, p.group_reduce)
            score = score / p.window_size + p.wide_weight * wide / p.wide
        if p.value_norm:
            score = score * step.rows.values.float().norm(dim=-1)
        recent = positions >= step.end - p.recent
        score = self._pool(score.masked_fill(recent | ~step.valid(), 0.0), positions)
        protected = recent | first_tokens(step, p.num_sink_tokens) if p.num_sink_tokens else recent
        value = torch.where(protected, float("inf"), score)
        return torch.where(step.valid(), value, float("-inf"))

    def _pool(self, score: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        order = positions.argsort(dim=-1).expand_as(score) if self.shuffled else None
        score = score if order is None else score.gather(-1, order)
        pooled = F.max_pool1d(F.pad(score, (self.policy.ahead, 0)), self.policy.ahead + 1, stride=1)
        return pooled if order is None else torch.empty_like(pooled).scatter_(-1, order, pooled)


def make_variant(model: PreTrainedModel, name: str, rows: int, arguments: dict[str, Any]) -> KVCache:
    """The variant called `name` with `rows` rows per KV head."""
    if name == "ahead":
        return KVCache(model, policy=Ahead(rows, **arguments))
    raise ValueError(f"unknown cache {name!r}: snapkv, h2o, window, identity or ahead")
