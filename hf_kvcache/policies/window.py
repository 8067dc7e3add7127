"""Sink tokens and a sliding window (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..rope import KeyRotation, find_rotations
from ..segments import Rows
from ..segments.dense import EMPTY
from .base import Keep, LayerPolicy, Policy, Step, check_flag, check_not_negative, check_positive, first_tokens, select


class SlidingWindow(Policy):
    """Keep the first `num_sink_tokens` tokens and the last `window_length`. Lossy.

    Holds at most `num_sink_tokens + window_length` rows per KV head. Sink keys are rotated forward by the number of
    tokens dropped between them and the window, so that a stream never meets a distance it was not trained on. With
    `move_sinks=False` they stay where they were: then attention is that of the full cache with the dropped tokens
    masked, whatever positions mean to the model, and distances grow with the stream.
    """

    name = "sinks + window"
    drops = True
    needs_model = True

    def __init__(self, window_length: int, num_sink_tokens: int = 4, move_sinks: bool = True):
        check_positive("window_length", window_length)
        check_not_negative("num_sink_tokens", num_sink_tokens)
        check_flag("move_sinks", move_sinks)
        self.window_length = window_length
        self.num_sink_tokens = num_sink_tokens
        self.move_sinks = move_sinks
        self.rotations: list[KeyRotation | None] | None = None

    def prepare(self, model: Any) -> Policy:
        if not self.move_sinks:
            return self
        ready = copy.copy(self)
        ready.rotations = find_rotations(model)
        return ready

    def for_layer(self, layer: int, layers: int, window: int | None) -> LayerPolicy:
        length = self.window_length if window is None else min(self.window_length, max(1, window - 1))
        sinks = self.num_sink_tokens if window is None else 0  # a sliding layer never sees its sinks again
        rotation = self.rotations[layer] if self.rotations else None
        return SlidingWindowLayer(length, sinks, rotation if sinks else None)

    def describe(self) -> dict[str, Any]:
        sizes = {"window_length": self.window_length, "num_sink_tokens": self.num_sink_tokens}
        return sizes if self.move_sinks else sizes | {"move_sinks": False}


class SlidingWindowLayer(LayerPolicy):
    drops = True
    reserve = 1

    def __init__(self, window_length: int, num_sink_tokens: int, rotation: KeyRotation | None) -> None:
        self.window_length = self.fifo_window = window_length
        self.num_sink_tokens = num_sink_tokens
        self.rotation = rotation

    @property
    def most_rows(self) -> int | None:
        return self.num_sink_tokens + self.window_length

    def kept_after(self, tokens: int) -> int:
        return min(tokens, self.num_sink_tokens + self.window_length)

    def rows_after(self, tokens: int) -> int:
        from ..segments import capacity_for

        budget = self.num_sink_tokens + self.window_length
        return budget + self.reserve if tokens > budget else capacity_for(tokens)

    def keep(self, step: Step) -> Keep | None:
        budget = self.num_sink_tokens + self.window_length
        positions = step.rows.positions
        if positions.shape[-1] <= budget:
            return None
        valid = step.valid()
        recent = positions >= step.end - self.window_length
        sink = first_tokens(step, self.num_sink_tokens)
        value = torch.where(valid & (sink | recent), positions.double(), float("-inf"))
        chosen = select(value, budget, valid_first=True)
        # Sinks stand first, then the window: the rows of earlier steps may lie in any order.
        assert chosen.filled is not None
        where = positions.gather(-1, chosen.index)
        by_position = torch.where(chosen.filled, where, torch.iinfo(where.dtype).max).argsort(dim=-1)
        return Keep(chosen.index.gather(-1, by_position), chosen.filled.gather(-1, by_position))

    def victim(self, step: Step) -> torch.Tensor | None:
        old = step.rows.positions[..., :-1]
        if old.shape[-1] < self.num_sink_tokens + self.window_length:
            return None
        # The oldest row of the window; an empty slot is older than any. Filled sink slots are never taken.
        age = old.clone()
        front = age[..., : self.num_sink_tokens]
        front.masked_fill_(front != EMPTY, torch.iinfo(age.dtype).max)
        return age.argmin(dim=-1, keepdim=True)

    def front_rows(self, rows: Rows, start: int) -> tuple[str, torch.Tensor] | None:
        sinks = self.num_sink_tokens
        if self.rotation is None or not sinks or rows.length < sinks:
            return None
        last_sink = rows.positions[..., :sinks].amax(dim=-1)  # [B, 1]
        gap = (start - self.window_length - last_sink - 1).clamp(min=0)
        which = self.rotation.which
        return which, self.rotation.apply(getattr(rows, which)[:, :, :sinks], gap)
