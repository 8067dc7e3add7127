"""Heavy hitters: the tokens that received the most attention so far (H2O, arXiv 2306.14048)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops.column_sums import column_sums
from ..segments import capacity_for
from .base import Keep, LayerPolicy, Policy, Step, check_not_negative, check_positive, check_ratio, first_tokens, select


class HeavyHitter(Policy):
    """Keep the `recent_size` newest rows and the `heavy_size` others with the largest attention sums. Lossy.

    The score of a row is the sum of its softmax column over all queries so far (exact, causal, mean over the query
    heads of its KV head); with `score="mean"`, the sum divided by the queries that could see it, which does not favour
    old rows. A hard budget: never more than `heavy + recent` rows per KV head after a step. Bytes per row:
    full precision plus 8 (position and score).
    """

    name = "heavy hitters"
    drops = True
    needs_model = True

    def __init__(
        self,
        heavy_size: int | None = None,
        recent_size: int | None = None,
        heavy_ratio: float | None = None,
        recent_ratio: float | None = None,
        num_sink_tokens: int = 0,
        score: str = "sum",
    ):
        check_positive("heavy_size", heavy_size, optional=True)
        check_positive("recent_size", recent_size, optional=True)
        check_ratio("heavy_ratio", heavy_ratio)
        check_ratio("recent_ratio", recent_ratio)
        check_not_negative("num_sink_tokens", num_sink_tokens)
        if score not in ("sum", "mean"):
            raise ValueError(f"`score` must be 'sum' or 'mean', got {score!r}")
        if heavy_size is not None and heavy_ratio is not None:
            raise ValueError("give `heavy_size` (tokens) or `heavy_ratio` (share of the prompt), not both")
        if recent_size is not None and recent_ratio is not None:
            raise ValueError("give `recent_size` (tokens) or `recent_ratio` (share of the prompt), not both")
        if heavy_size is None and heavy_ratio is None:
            heavy_ratio = 0.1
        if recent_size is None and recent_ratio is None:
            recent_ratio = 0.1
        if heavy_size is not None and num_sink_tokens > heavy_size:
            raise ValueError(f"`num_sink_tokens` ({num_sink_tokens}) must not exceed `heavy_size` ({heavy_size})")
        if (heavy_ratio or 0) + (recent_ratio or 0) > 1:
            raise ValueError("`heavy_ratio + recent_ratio` must not exceed 1")
        self.heavy_size = heavy_size
        self.recent_size = recent_size
        self.heavy_ratio = heavy_ratio
        self.recent_ratio = recent_ratio
        self.num_sink_tokens = num_sink_tokens
        self.score = score

    def for_layer(self, layer: int, layers: int, window: int | None) -> LayerPolicy:
        return HeavyHitterLayer(self)

    def describe(self) -> dict[str, Any]:
        names = ("heavy_size", "recent_size", "heavy_ratio", "recent_ratio")
        args = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return args | {"num_sink_tokens": self.num_sink_tokens, "score": self.score}


class HeavyHitterLayer(LayerPolicy):
    drops = True
    uses_scores = True
    needs_queries = True
    per_head_positions = True
    overwrites = True
    reserve = 1
    state_bytes = 16

    def __init__(self, policy: HeavyHitter) -> None:
        self.policy = policy
        # Budgets of each batch row, fixed by its first prompt: [B] each.
        self.heavy: torch.Tensor | None = None
        self.recent: torch.Tensor | None = None
        self.largest = self.smallest = 0

    def _sizes(self, tokens: int) -> tuple[int, int]:
        p = self.policy
        heavy = p.heavy_size or max(1, p.num_sink_tokens, int((p.heavy_ratio or 0) * tokens))
        recent = p.recent_size or max(1, int((p.recent_ratio or 0) * tokens))
        return heavy, recent

    def _fix_budgets(self, step: Step) -> None:
        sizes = [self._sizes(count) for count in step.token_counts()]
        device = step.rows.positions.device
        self.heavy = torch.tensor([h for h, _ in sizes], device=device)
        self.recent = torch.tensor([r for _, r in sizes], device=device)
        self.largest = max(h + r for h, r in sizes)
        self.smallest = min(h + r for h, r in sizes)

    @property
    def most_rows(self) -> int | None:
        heavy, recent = self.policy.heavy_size, self.policy.recent_size
        return None if heavy is None or recent is None else heavy + recent

    def kept_after(self, tokens: int) -> int:
        return min(tokens, sum(self._sizes(tokens)))

    def rows_after(self, tokens: int) -> int:
        budget = sum(self._sizes(tokens))
        return budget + self.reserve if tokens > budget else capacity_for(tokens)

    def wants_probs(self, step_tokens: int, held: int) -> bool:
        return step_tokens == 1

    def observe(self, step: Step) -> None:
        if self.heavy is None or step.prompt:
            # Ratios are of the prompt; one that comes in chunks, or in turns, raises the budget as it goes.
            self._fix_budgets(step)
        scores = step.rows.scores
        assert scores is not None
        if step.recorded is not None:
            scores += step.recorded
        if step.probs is not None:
            b, hq, q, n = step.probs.shape
            sums = step.probs.view(b, scores.shape[1], -1, q, n).mean(2)
            if step.real is not None:
                sums = sums * step.real[:, None, :, None]
            scores += sums.sum(2)
        elif step.query is not None and step.query.shape[2]:
            scores += attention_sums(step, scores.shape[1])

    def _value(self, step: Step) -> torch.Tensor:
        """What each row is worth: its score; `+inf` where protected, `-inf` where empty."""
        positions, scores = step.rows.positions, step.rows.scores
        assert scores is not None and self.recent is not None
        if self.policy.score == "mean":
            scores = scores / (step.end - positions).clamp(min=1)
        recent = positions >= step.end - self.recent[:, None, None]
        value = torch.where(recent, float("inf"), scores)
        if self.policy.num_sink_tokens:
            value = torch.where(first_tokens(step, self.policy.num_sink_tokens), float("inf"), value)
        return torch.where(step.valid(), value, float("-inf"))

    def keep(self, step: Step) -> Keep | None:
        assert self.heavy is not None and self.recent is not None
        if step.rows.length <= self.smallest:
            return None
        k = min(self.largest, step.rows.length)
        return select(self._value(step), k, per_row=self.heavy + self.recent)

    def victim(self, step: Step) -> torch.Tensor | None:
        assert self.heavy is not None and self.recent is not None
        if step.rows.length <= self.largest:
            return None
        value = self._value(step)[..., :-1]
        # A batch row with a smaller budget than the largest is full while it still has empty slots.
        empty = value == float("-inf")
        full = (~empty).sum(-1, keepdim=True) >= (self.heavy + self.recent)[:, None, None]
        return torch.where(empty & full, float("inf"), value).argmin(dim=-1, keepdim=True)

    def reset(self) -> None:
        self.heavy = self.recent = None
        self.largest = self.smallest = 0

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.heavy is not None and self.recent is not None:
            self.heavy, self.recent = fn(self.heavy), fn(self.recent)

    def tensors(self) -> list[torch.Tensor]:
        return [] if self.heavy is None or self.recent is None else [self.heavy, self.recent]

    def partial_scores(self, step: Step) -> torch.Tensor:
        assert step.rows.scores is not None
        return attention_sums(step, step.rows.scores.shape[1])

    def state(self) -> dict[str, Any]:
        if self.heavy is None or self.recent is None:
            return {}
        return {"heavy": self.heavy.tolist(), "recent": self.recent.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        if state:
            self.heavy, self.recent = torch.tensor(state["heavy"]), torch.tensor(state["recent"])
            total = self.heavy + self.recent
            self.largest, self.smallest = int(total.max()), int(total.min())


def attention_sums(step: Step, heads: int, reduce: str = "mean") -> torch.Tensor:
    """Column sums `[B, heads, N]` of the step's queries over all rows; padding queries do not count."""
    assert step.query is not None
    q_len = step.query.shape[2]
    real = step.real[:, step.new - q_len :] if step.real is not None else None
    sums = column_sums(step.query, step.keys, step.extras, step.visible, step.bias, real, reduce)
    if sums.shape[1] != heads:  # keys were expanded to more heads than the cache stores (MLA)
        sums = sums.view(sums.shape[0], heads, -1, sums.shape[-1])
        sums = sums.amax(2) if reduce == "max" else sums.mean(2)
    return sums
