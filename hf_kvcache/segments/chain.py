"""Chain: the ordered segments of one layer. All but the last are sealed: read-only, and shared by copies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .dense import DenseSegment, Rows


class Chain:
    """Sealed segments, oldest first, and a tail that grows.

    Most layers have the tail alone. `seal` closes it and starts a new one; from then on a copy of the cache shares the
    sealed rows instead of copying them, and attention over the layer is the merge of attention over its segments.

    A sealed segment may hold one batch row where the tail has many: it then stands for all of them, and stays as it is
    whatever happens to the batch.
    """

    def __init__(self) -> None:
        self.sealed: list[DenseSegment] = []
        self.tail = DenseSegment()
        self.batch = 0

    @property
    def length(self) -> int:
        return sum(segment.length for segment in self.sealed) + self.tail.length

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all segments; a sealed one that copies share counts in each of them (once, also if it was split)."""
        held: dict[int, int] = {}
        for segment in self.sealed:
            held |= segment.storages()
        return sum(held.values()) + self.tail.nbytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, KV heads, key size, value size)."""
        return self.batch, *(self.sealed[0] if self.sealed else self.tail).shape[1:]

    @property
    def element_size(self) -> int:
        return (self.sealed[0] if self.sealed else self.tail).element_size

    @property
    def positions(self) -> torch.Tensor:
        """`[B, H|1, N]` positions of all rows."""
        batch = self.shape[0]
        parts = [part.positions.expand(batch, -1, -1) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    @property
    def parts(self) -> list[Rows]:
        """The rows of each segment that holds any, oldest first; those of a sealed one may be of one batch row."""
        return [segment.rows for segment in (*self.sealed, self.tail) if not segment.is_empty]

    @property
    def rows(self) -> Rows:
        """All rows in order: views of the buffers for one segment, a copy for several."""
        parts = self.parts
        if not parts:
            return self.tail.rows
        batch = self.shape[0]
        if any(part.keys.shape[0] != batch for part in parts):
            parts = [part.map(lambda t: t.expand(batch, *t.shape[1:])) for part in parts]
        if len(parts) < 2:
            return parts[0]
        tables = [part.tensors() for part in parts]
        return Rows(**{name: torch.cat([table[name] for table in tables], dim=2) for name in tables[0]})

    def seal(self) -> Chain:
        if not self.tail.is_empty:
            self.sealed.append(self.tail)
            self.tail = DenseSegment()
        return self

    def adopt(self, parts: list[Rows]) -> None:
        """Begin with these read-only rows, which belong to somebody else too."""
        self.clear()
        self.sealed, self.batch = [DenseSegment.of(rows) for rows in parts], 1

    def append(self, rows: Rows) -> None:
        self.batch = rows.keys.shape[0]
        self.tail.append(rows)

    def replace(self, rows: Rows, reserve: int = 0) -> None:
        self.sealed, self.batch = [], rows.keys.shape[0]
        self.tail.replace(rows, reserve)

    def overwrite(self, slot: torch.Tensor) -> None:
        self.tail.overwrite(slot)

    def mark(self, positions: torch.Tensor) -> None:
        """Rewrite the positions of the newest rows."""
        self.tail.rows.positions[:, :, -positions.shape[-1] :].copy_(positions)

    def crop(self, n: int, seen: int | None = None) -> None:
        """Forget the last `n` rows. A sealed segment is shortened in this chain only."""
        cut = min(n, self.tail.length)
        self.tail.crop(cut)
        n -= cut
        while n > 0 and self.sealed:
            last = self.sealed.pop()
            if last.length > n:
                self.sealed.append(last.head(last.length - n))
                break
            n -= last.length

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        # One batch row that stands for all of them does so for any choice of them.
        self.sealed = [segment if segment.shape[0] == 1 else segment.mapped(fn) for segment in self.sealed]
        self.tail.batch_map(fn)
        self.batch = fn(torch.arange(self.batch)).shape[0]

    def clear(self) -> None:
        self.sealed, self.batch = [], 0
        self.tail.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> Chain:
        from copy import deepcopy

        twin = Chain()
        twin.sealed, twin.batch = list(self.sealed), self.batch
        twin.tail = deepcopy(self.tail, memo)
        return twin
