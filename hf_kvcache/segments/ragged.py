"""Ragged: rows in full precision where each KV head holds a number of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from .dense import EMPTY, DenseSegment, Rows


class Ragged:
    """One buffer for each KV head, so that a head which needs few rows really takes few bytes. Lossless.

    Rows that are added go to every head; heads differ because a policy keeps more of one than of another. Across the
    batch a head is as long as its longest row. `rows` shows all heads at the length of the longest, shorter ones with
    empty slots in front: for prompts, where rows are selected anew; decoding goes over `heads`.
    """

    def __init__(self) -> None:
        self.heads: list[DenseSegment] = []

    @property
    def lengths(self) -> list[int]:
        """Rows held by each KV head."""
        return [head.length for head in self.heads]

    @property
    def length(self) -> int:
        """Rows held by the KV head that holds most."""
        return max(self.lengths, default=0)

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    @property
    def nbytes(self) -> int:
        return sum(head.nbytes for head in self.heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, KV heads, key size, value size)."""
        batch, _, key, value = self.heads[0].shape
        return batch, len(self.heads), key, value

    @property
    def element_size(self) -> int:
        return self.heads[0].element_size

    @property
    def positions(self) -> torch.Tensor:
        """`[B, H, N]`, with `EMPTY` in front of shorter heads."""
        return self._even("positions", EMPTY)

    @property
    def rows(self) -> Rows:
        """All heads at the same length: a copy."""
        scores = self._even("scores", 0.0) if self.heads[0].rows.scores is not None else None
        return Rows(self._even("keys", 0.0), self._even("values", 0.0), self.positions, scores)

    @property
    def parts(self) -> list[Rows]:
        return [self.rows] if not self.is_empty else []

    def _even(self, name: str, fill: float) -> torch.Tensor:
        longest = self.length
        padded = []
        for head in self.heads:
            tensor = head.rows.tensors()[name]
            missing = longest - tensor.shape[2]
            padded.append(F.pad(tensor, (0, 0, missing, 0) if tensor.ndim == 4 else (missing, 0), value=fill))
        return torch.cat(padded, dim=1)

    def append(self, rows: Rows) -> None:
        if not self.heads:
            self.heads = [DenseSegment() for _ in range(rows.keys.shape[1])]
        for segment, part in zip(self.heads, _split(rows), strict=True):
            segment.append(part)

    def replace(self, rows: Rows, reserve: int = 0) -> None:
        """Hold `rows`, whose empty slots stand in front: those that are empty in the whole batch are left out."""
        self.heads = []
        for part in _split(rows):
            held = (part.positions != EMPTY).sum(-1).max()
            start = part.length - int(held)
            segment = DenseSegment()
            segment.replace(Rows(**{n: t[:, :, start:] for n, t in part.tensors().items()}), max(1, reserve))
            self.heads.append(segment)

    def overwrite(self, slot: torch.Tensor) -> None:
        raise NotImplementedError("rows of heads with numbers of their own are not overwritten")

    def mark(self, positions: torch.Tensor) -> None:
        """Rewrite the positions `[B, 1, n]` of the newest rows."""
        for head in self.heads:
            head.rows.positions[:, :, -positions.shape[-1] :].copy_(positions)

    def crop(self, n: int, seen: int | None = None) -> None:
        """Forget the last `n` rows of every head."""
        for head in self.heads:
            head.crop(n)

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for head in self.heads:
            head.batch_map(fn)

    def clear(self) -> None:
        self.heads = []


def _split(rows: Rows) -> list[Rows]:
    """One table for each head."""
    heads = rows.keys.shape[1]

    def pick(tensor: torch.Tensor, head: int) -> torch.Tensor:
        return tensor if tensor.shape[1] != heads else tensor[:, head : head + 1]

    return [Rows(**{name: pick(tensor, h) for name, tensor in rows.tensors().items()}) for h in range(heads)]
