"""SnapKV: the rows that the end of the prompt looks at (arXiv 2404.14469); PyramidKV budgets (2406.02069)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ..segments import capacity_for
from ..segments.dense import EMPTY
from .base import (
    Keep,
    LayerPolicy,
    Policy,
    Step,
    check_flag,
    check_not_negative,
    check_positive,
    check_ratio,
    first_tokens,
    select,
)
from .heavy_hitter import attention_sums


class SnapKV(Policy):
    """After a prompt, keep the rows that its last `window_size` queries attend to most, and those last rows. Lossy.

    Score of a row: softmax in float32, averaged over the window's queries, reduced over the query heads of its KV head
    (`group_reduce`, `"mean"` or `"max"`), optionally plus the average over a wider window (`wide_window`), optionally
    times the norm of its value (`value_norm`), pooled over neighbours: centred (`"avgpool"`, `"maxpool"`), or looking
    ahead (`"ahead"`: a row takes the largest score of itself and the `kernel_size - 1` rows before it, since what
    follows a row that is looked at is what the model reads next when it copies). `recent_ratio` keeps more recent rows
    than there are observing queries. With `adaptive_heads` (AdaKV, arXiv 2407.11550) the heads of a layer share their
    rows: each keeps its best `floor_alpha * capacity`, the rest go to the best rows of all heads, and every head is
    stored at its own length. Holds `max_capacity_prompt` rows per KV head after each prompt; generated tokens
    are added, without bound unless `decode_budget` is given: then a new token replaces the row that the current query
    attends to least (never one of the last `window_size`). Bytes per row: full precision plus 4 (position).
    """

    name = "SnapKV"
    drops = True
    needs_model = True

    def __init__(
        self,
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
    ):
        check_positive("max_capacity_prompt", max_capacity_prompt)
        check_positive("window_size", window_size)
        check_positive("kernel_size", kernel_size)
        check_positive("pyramid_beta", pyramid_beta, optional=True)
        check_positive("decode_budget", decode_budget, optional=True)
        check_not_negative("num_sink_tokens", num_sink_tokens)
        check_positive("wide_window", wide_window, optional=True)
        check_ratio("recent_ratio", recent_ratio)
        check_ratio("floor_alpha", floor_alpha, optional=False, open_below=False)
        check_flag("value_norm", value_norm)
        check_flag("adaptive_heads", adaptive_heads)
        if adaptive_heads and pyramid_beta is not None:
            raise ValueError("`adaptive_heads` and `pyramid_beta` do not go together. Leave one of them out.")
        if adaptive_heads and decode_budget is not None:
            raise ValueError(
                "`adaptive_heads` and `decode_budget` do not go together: heads of different lengths have no common "
                "slot to overwrite. Leave one of them out."
            )
        if pooling not in ("avgpool", "maxpool", "ahead"):
            raise ValueError(f"`pooling` must be 'avgpool', 'maxpool' or 'ahead', got {pooling!r}")
        if kernel_size % 2 == 0 and pooling != "ahead":
            raise ValueError(f"`kernel_size` must be odd, so that pooling stays centred, got {kernel_size}")
        if group_reduce not in ("mean", "max"):
            raise ValueError(f"`group_reduce` must be 'mean' or 'max', got {group_reduce!r}")
        if window_size + num_sink_tokens >= max_capacity_prompt:
            raise ValueError(
                f"`max_capacity_prompt` ({max_capacity_prompt}) must be larger than `window_size + num_sink_tokens` "
                f"({window_size + num_sink_tokens}): raise it or shrink the window"
            )
        if wide_window is not None and wide_window <= window_size:
            raise ValueError(f"`wide_window` ({wide_window}) must be larger than `window_size` ({window_size})")
        if int((recent_ratio or 0) * max_capacity_prompt) + num_sink_tokens >= max_capacity_prompt:
            raise ValueError(
                f"`recent_ratio` ({recent_ratio}) and `num_sink_tokens` leave no room for selected rows in "
                f"`max_capacity_prompt` ({max_capacity_prompt})"
            )
        self.max_capacity_prompt = max_capacity_prompt
        self.window_size = window_size
        self.kernel_size = kernel_size
        self.pooling = pooling
        self.pyramid_beta = pyramid_beta
        self.decode_budget = decode_budget
        self.num_sink_tokens = num_sink_tokens
        self.group_reduce = group_reduce
        self.value_norm = value_norm
        self.wide_window = wide_window
        self.recent_ratio = recent_ratio
        self.adaptive_heads = adaptive_heads
        self.floor_alpha = floor_alpha

    def for_layer(self, layer: int, layers: int, window: int | None) -> LayerPolicy:
        return SnapKVLayer(self, self.capacity(layer, layers), window)

    def capacity(self, layer: int, layers: int) -> int:
        """Rows per KV head that layer `layer` keeps of a prompt."""
        if self.pyramid_beta is None or layers == 1:
            return self.max_capacity_prompt
        base = self.max_capacity_prompt - self.window_size
        low = base // self.pyramid_beta
        high = 2 * base - low
        share = high - (high - low) * layer // (layers - 1)
        return max(share, self.num_sink_tokens + 1) + self.window_size

    def describe(self) -> dict[str, Any]:
        return dict(vars(self))


class SnapKVLayer(LayerPolicy):
    drops = True
    needs_queries = True
    per_head_positions = True

    def __init__(self, policy: SnapKV, capacity: int, window: int | None = None) -> None:
        self.policy = policy
        self.capacity = capacity
        self.ragged = policy.adaptive_heads
        self.overwrites = policy.decode_budget is not None
        self.window = window
        self.shuffled = False  # rows are no longer in the order of their positions

    @property
    def reserve(self) -> int:  # type: ignore[override]
        room = min(32, max(8, self.capacity // 32))
        return room if self.policy.decode_budget is None else min(room, self.policy.decode_budget + 1)

    @property
    def most_rows(self) -> int | None:
        return self._bound()

    def kept_after(self, tokens: int) -> int:
        if tokens <= self.policy.max_capacity_prompt:
            return tokens
        return min(tokens, self.capacity)

    def rows_after(self, tokens: int) -> int:
        if tokens <= self.capacity or tokens <= self.policy.max_capacity_prompt:
            return capacity_for(tokens)
        # Heads that are cut to their own length hold no rows that are out of sight.
        visible = self.window - 1 if self.ragged and self.window is not None else self.capacity
        return min(self.capacity, visible) + self.reserve

    def _bound(self) -> int | None:
        """Rows that may be held after a step of decoding."""
        return None if self.policy.decode_budget is None else self.capacity + self.policy.decode_budget

    def wants_probs(self, step_tokens: int, held: int) -> bool:
        bound = self._bound()
        return step_tokens == 1 and bound is not None and held + step_tokens > bound

    def keep(self, step: Step) -> Keep | None:
        limit = self.capacity if step.prompt else self._bound()
        if limit is None or step.rows.length <= limit:
            return None
        if self.ragged:
            return self._keep_by_head(step, limit)
        per_row = None
        if step.prompt and self.policy.pyramid_beta is not None:
            # A prompt within the capacity passes through whole, in the layers with a smaller share too.
            counts = step.token_counts()
            whole = self.policy.max_capacity_prompt
            if max(counts) <= whole:
                return None
            sizes = [count if count <= whole else limit for count in counts]
            per_row = torch.tensor(sizes, device=step.rows.positions.device)
            limit = min(step.rows.length, max(sizes))
        chosen = select(self._value(step), limit, per_row)
        if not self.shuffled:
            return chosen
        assert chosen.filled is not None
        order = step.rows.positions.gather(-1, chosen.index).masked_fill(~chosen.filled, EMPTY).argsort(dim=-1)
        self.shuffled = False
        return Keep(chosen.index.gather(-1, order), chosen.filled.gather(-1, order))

    def _keep_by_head(self, step: Step, limit: int) -> Keep | None:
        """`limit` rows per head on average: each head its best few, the rest to the best rows of all heads (AdaKV)."""
        value = self._value(step)  # [B, H, N]
        batch, heads, n = value.shape
        seen_again = value != float("-inf")
        expired = (step.rows.positions != EMPTY) & ~seen_again
        if bool(seen_again.sum((1, 2)).le(heads * limit).all()) and not bool(expired.any()):
            return None
        protected = value == float("inf")
        floor = int(self.policy.floor_alpha * limit)
        rank = value.masked_fill(protected, float("-inf")).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        own = protected | ((rank < floor) & seen_again)
        ranked = value.masked_fill(own, float("inf")).flatten(1)
        best, index = (t[:, : heads * limit] for t in ranked.sort(dim=-1, descending=True, stable=True))
        chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(1, index, best != float("-inf"))
        chosen = chosen.view(batch, heads, n)
        longest = int(chosen.sum(-1).max())
        order = chosen.to(torch.int8).argsort(dim=-1, stable=True)[..., n - longest :]  # empty slots stand in front
        return Keep(order, chosen.gather(-1, order))

    def victim(self, step: Step) -> torch.Tensor | None:
        bound = self._bound()
        if bound is None or step.rows.length <= bound:
            return None
        self.shuffled = True
        value = self._value(step)[..., :-1]
        # With a codec a full row of a batch may have empty slots all the same.
        empty = value == float("-inf")
        full = (~empty).sum(-1, keepdim=True) >= bound
        return torch.where(empty & full, float("inf"), value).argmin(dim=-1, keepdim=True)

    def _value(self, step: Step) -> torch.Tensor:
        """What each row is worth `[B, H, N]`; `+inf` where protected, `-inf` where empty."""
        p, positions = self.policy, step.rows.positions
        heads = step.rows.keys.shape[1]
        if step.probs is not None:
            b, _, q, n = step.probs.shape
            score = step.probs.view(b, heads, -1, q, n).mean(2).sum(2)
        else:
            score = attention_sums(_window(step, p.window_size), heads, p.group_reduce)
            if p.wide_window is not None:
                wide = attention_sums(_window(step, p.wide_window), heads, p.group_reduce)
                score = score / p.window_size + wide / p.wide_window
        if p.value_norm:
            score = score * step.rows.values.float().norm(dim=-1)
        recent = positions >= step.end - max(p.window_size, int((p.recent_ratio or 0) * self.capacity))
        protected = recent
        if p.num_sink_tokens:
            protected = protected | first_tokens(step, p.num_sink_tokens)
        if step.prompt:
            # Rows of the window are kept anyway; they must not lift their neighbours through the pooling.
            score = self._pool(score.masked_fill(recent | ~step.valid(), 0.0), positions, step.rows.in_order)
        value = torch.where(protected, float("inf"), score)
        return torch.where(step.valid(), value, float("-inf"))

    def _pool(self, score: torch.Tensor, positions: torch.Tensor, in_order: bool) -> torch.Tensor:
        kernel = self.policy.kernel_size
        order = None
        if self.shuffled or not in_order:
            order = positions.argsort(dim=-1, stable=True).expand_as(score)
            score = score.gather(-1, order)
        if self.policy.pooling == "ahead":
            pooled = F.max_pool1d(F.pad(score, (kernel - 1, 0)), kernel, stride=1)
        elif self.policy.pooling == "maxpool":
            pooled = F.max_pool1d(score, kernel, stride=1, padding=kernel // 2)
        else:
            pooled = F.avg_pool1d(score, kernel, stride=1, padding=kernel // 2)
        return pooled if order is None else torch.empty_like(pooled).scatter_(-1, order, pooled)

    def reset(self) -> None:
        self.shuffled = False

    def state(self) -> dict[str, Any]:
        return {"shuffled": self.shuffled}

    def load_state(self, state: dict[str, Any]) -> None:
        self.shuffled = bool(state.get("shuffled", False))


def _window(step: Step, size: int) -> Step:
    """The step as seen by its last `size` queries only."""
    assert step.query is not None
    skip = max(0, step.query.shape[2] - size)
    if not skip:
        return step
    return replace(
        step,
        query=step.query[:, :, skip:],
        visible=lambda start, stop: step.visible(start + skip, stop + skip),
        bias=lambda start, stop: step.bias(start + skip, stop + skip),
    )
