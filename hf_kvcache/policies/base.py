"""The question a policy answers: which rows stay?

A `Policy` is what the user chose; `for_layer` makes one `LayerPolicy` for each layer. After a layer has attended (so
that the step's own output saw every row), it shows its policy a `Step`, and the policy names the rows to keep.

Invariants of every policy:
- It looks at positions and visibility only through the `Step`; it never touches keys, lengths or buffers itself.
- A row of padding (`position == EMPTY`) is never preferred to a real one, and never counts.
- What it keeps for one batch row does not depend on the others, nor on how much padding stands before it.
- It reduces scores of a group of query heads to their KV head.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.attention import Extras
from ..segments import Rows
from ..segments.dense import EMPTY


@dataclass
class Step:
    """One step of a layer, after attention. Row order: rows held before, then the new ones."""

    rows: Rows  # every row, new ones included
    new: int  # how many of them are new
    start: int  # sequence index of the first new token
    query: torch.Tensor | None  # [B, Hq, Q, D] queries of the last Q <= new tokens, where the policy needs them
    model_keys: torch.Tensor | None  # [B, Hk, N, D] the keys those queries saw, where they are not those of `rows`
    visible: Callable[[int, int], torch.Tensor | None]  # queries (start, stop) of `query` -> bool [B, Hk|1, q, N]
    bias: Callable[[int, int], torch.Tensor | None]  # the same for an additive bias
    real: torch.Tensor | None  # bool [B, new]: False where a new token is padding; None: all real
    extras: Extras
    prompt: bool  # a prompt (or a part of one), as against decoding and the verification of drafts
    probs: torch.Tensor | None = None  # [B, Hq, new, N] if the attention path had to compute them anyway
    horizon: int | torch.Tensor = EMPTY  # positions up to here are never seen again
    padding: torch.Tensor | None = None  # [B] padding tokens before each batch row
    recorded: torch.Tensor | None = None  # [B, H, N] scores of earlier queries of this step (recording mode)
    latent: bool = False  # queries over latents (absorbed MLA): their keys are both tensors of the rows, joined

    @property
    def keys(self) -> torch.Tensor:
        """`[B, Hk, N, D]` the keys that the queries saw (heads as the model sees them)."""
        if self.latent:
            return torch.cat([self.rows.keys, self.rows.values], dim=-1)
        return self.rows.keys if self.model_keys is None else self.model_keys

    @property
    def end(self) -> int:
        """Sequence index one past the last token of the step."""
        return self.start + self.new

    def valid(self) -> torch.Tensor:
        """Bool `[B, H|1, N]`: rows that hold a real token which a later query can still see."""
        return self.rows.positions > self.horizon

    def token_counts(self) -> list[int]:
        """Real tokens given so far, for each batch row."""
        batch = self.rows.positions.shape[0]
        return [self.end] * batch if self.padding is None else (self.end - self.padding).tolist()


@dataclass
class Keep:
    """A policy's answer: row indices to keep, `[B, H|1, K]` in the order wanted.

    `filled` (same shape) is False for slots that are to be left empty, where a batch row has fewer rows to keep.
    """

    index: torch.Tensor
    filled: torch.Tensor | None = None


class LayerPolicy:
    """The policy of one layer, with whatever small state it needs. The base class keeps everything."""

    drops = False  # may ever drop a row
    uses_scores = False  # rows carry a score
    needs_queries = False  # looks at queries after attention
    ragged = False  # heads come to hold different numbers of rows
    per_head_positions = False  # heads come to hold different tokens
    overwrites = False  # gives single slots to new rows
    fifo_window: int | None = None  # keeps the first `num_sink_tokens` rows and this many newest ones
    num_sink_tokens = 0
    reserve = 0  # free rows to leave when the rows are rewritten
    state_bytes = 0  # bytes of `tensors()` for each batch row

    def wants_probs(self, step_tokens: int, held: int) -> bool:
        """Whether the attention path should hand over its probabilities for a step of this size."""
        return False

    def observe(self, step: Step) -> None:
        """Look at a step; update scores in `step.rows.scores` in place."""

    def keep(self, step: Step) -> Keep | None:
        """The rows to keep, or None for all."""
        return None

    def victim(self, step: Step) -> torch.Tensor | None:
        """For a step of one token on a full layer: the slot `[B, H|1, 1]` the new row takes over, or None.

        Asked only when the rows were written by an earlier `keep` (in its order).
        """
        return None

    @property
    def most_rows(self) -> int | None:
        """Rows that are ever held once the prompt is read, or None where they grow or depend on the prompt."""
        return None

    def kept_after(self, tokens: int) -> int:
        """Rows held after a prompt of `tokens`, slack not included."""
        return tokens

    def rows_after(self, tokens: int) -> int:
        """Rows allocated after a prompt of `tokens`, slack included (the formula behind `expected_bytes`)."""
        raise NotImplementedError(f"{type(self).__name__} gives no `rows_after(tokens)`, so its bytes have no formula")

    def front_rows(self, rows: Rows, start: int) -> tuple[str, torch.Tensor] | None:
        """`("keys" | "values", [B, H, F, D])` to use in place of the first F rows (moved sink tokens), or None.

        `start` is the sequence index of the next token.
        """
        return None

    def partial_scores(self, step: Step) -> torch.Tensor:
        """Scores `[B, H, N]` that the queries of `step` add (for policies with `uses_scores`)."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything learned from the data."""

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a batch operation to per-batch state, if any."""

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of that state, for counting bytes."""
        return []

    def state(self) -> dict[str, Any]:
        """JSON-able state and tensors for `save`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""


class Policy:
    """Base of all policies, and the one that keeps every row. Lossless."""

    name = "keep all"
    drops = False
    needs_model = False

    def for_layer(self, layer: int, layers: int, window: int | None) -> LayerPolicy:
        """The policy of layer `layer` of `layers`; `window` is the layer's own sliding window, if it has one."""
        from .keep_all import KeepAllLayer

        return KeepAllLayer(window)

    def prepare(self, model: Any) -> Policy:
        """This policy, ready for `model` (a copy, if something has to be learned from the model)."""
        return self

    def describe(self) -> dict[str, Any]:
        """The arguments, for `print(cache)` and for saved files: by default the public plain attributes."""
        plain = (int, float, str, bool, list)
        return {k: v for k, v in vars(self).items() if not k.startswith("_") and (v is None or isinstance(v, plain))}


def select(value: torch.Tensor, k: int, per_row: torch.Tensor | None = None, valid_first: bool = False) -> Keep:
    """The `k` rows of highest `value` `[B, H|1, N]` in their old order; at most `per_row` `[B]` of them are filled.

    Rows of value `-inf` are never filled. With `valid_first` empty slots come last, otherwise first.
    """
    # Stable, unlike `topk`: of equal values (maxpool makes many) the older row stays, however much padding there is.
    best, indices = (t[..., :k] for t in value.sort(dim=-1, descending=True, stable=True))
    filled = best != float("-inf")
    if per_row is not None:
        rank = torch.arange(k, device=value.device)
        filled = filled & (rank < per_row.to(value.device)[:, None, None])
    n = value.shape[-1]
    key = torch.where(filled, indices, indices + n if valid_first else indices - n)
    order = key.argsort(dim=-1)
    return Keep(indices.gather(-1, order), filled.gather(-1, order))


def first_tokens(step: Step, count: int) -> torch.Tensor:
    """Bool `[B, H|1, N]`: the first `count` real rows of each batch row (protected, so still held)."""
    positions = step.rows.positions
    order = torch.where(step.valid(), positions, torch.iinfo(positions.dtype).max).argsort(dim=-1).argsort(dim=-1)
    return step.valid() & (order < count)


def check_positive(name: str, value: Any, optional: bool = False) -> None:
    if (value is None and optional) or (_is_whole(value) and value > 0):
        return
    raise ValueError(f"`{name}` must be a positive whole number, got {value!r}")


def check_not_negative(name: str, value: Any) -> None:
    if not _is_whole(value) or value < 0:
        raise ValueError(f"`{name}` must be zero or a positive whole number, got {value!r}")


def check_ratio(name: str, value: Any, optional: bool = True, least: float = 0.0, open_below: bool = True) -> None:
    if value is None and optional:
        return
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not least <= value <= 1 or (open_below and value == least):
        raise ValueError(f"`{name}` must lie in {'(' if open_below else '['}0, 1], got {value!r}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
