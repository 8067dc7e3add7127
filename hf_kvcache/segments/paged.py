"""PagedSegment: the rows of one layer in blocks of a pool, shared copy-on-write."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch

from ..paging.arena import Arena, Kind
from ..paging.pieces import Piece, pieces_of, run_of
from ..paging.pool import BlockPool, Table
from .dense import DenseSegment, Rows, _in_graph


class PagedRows(Rows):
    """A table whose keys and values are brought together only where somebody reads them."""

    def __init__(self, table: Table) -> None:
        assert table.arena is not None
        self._arena, self._ids, self._length = table.arena, table.ids, table.length
        self._read: dict[str, torch.Tensor] = {}
        self.scores = None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return self._get("keys")

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self._get("values")

    @property
    def positions(self) -> torch.Tensor:  # type: ignore[override]
        return self._get("positions")

    @property
    def length(self) -> int:
        return self._length

    def _get(self, which: str) -> torch.Tensor:
        if which not in self._read:
            whole = run_of(self._ids)
            rows = self._arena.gather(which, self._ids) if whole is None else _viewed(self._arena, which, whole)
            self._read[which] = rows[:, :, : self._length]
        return self._read[which]


class PagedSegment:
    """Rows of one layer, `block_size` tokens of one sequence to a block of a `BlockPool`. Lossless.

    The interface is that of `Chain`. A batch operation or a copy of the cache copies the block table `[B, n]` and
    counts references; `_own` copies a block that is shared before it is written. Rows that a training step may still
    need stay outside of the pool (`loose`) until a step without gradients comes.
    """

    def __init__(self, pool: BlockPool, layer: int) -> None:
        self.pool, self.layer = pool, layer
        self._table = pool.table(self)
        self.loose: DenseSegment | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> PagedSegment:
        twin = PagedSegment(self.pool, self.layer)
        twin.loose = deepcopy(self.loose, memo)
        mine, table = self._table, twin._table
        with self.pool.lock:
            if mine.arena is not None:
                mine.arena.hold(mine.ids)
                table.arena, table.ids, table.length = mine.arena, mine.ids, mine.length
        return twin

    # ------------------------------------------------------------------ what it holds

    @property
    def arena(self) -> Arena:
        assert self._table.arena is not None
        return self._table.arena

    @property
    def table(self) -> np.ndarray:
        """Block ids, int32 `[B, n]`. Never changed in place: copies share it."""
        return self._table.ids

    @property
    def length(self) -> int:
        return self._table.length if self.loose is None else self.loose.length

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that the table refers to, each once, and of the table."""
        if self.loose is not None:
            return self.loose.nbytes
        if self._table.arena is None:
            return 0
        return len(np.unique(self.table)) * self.arena.block_bytes + self.table.nbytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, KV heads, key size, value size)."""
        if self.loose is not None:
            return self.loose.shape
        kind = self.arena.kind
        return len(self.table), kind.heads, kind.key_dim, kind.value_dim

    @property
    def element_size(self) -> int:
        return self.arena.kind.key_dtype.itemsize if self.loose is None else self.loose.element_size

    @property
    def device(self) -> torch.device:
        return self.arena.kind.device if self.loose is None else self.loose.device

    @property
    def positions(self) -> torch.Tensor:
        """`[B, H|1, N]` positions of all rows."""
        return self.rows.positions

    @property
    def rows(self) -> Rows:
        """All rows in order: read from the blocks when they are asked for, where they lie if they lie together."""
        return PagedRows(self._table) if self.loose is None else self.loose.rows

    @property
    def parts(self) -> list[Rows]:
        return [] if self.is_empty else [self.rows]

    def pieces(self) -> tuple[Piece, ...]:
        """Runs of columns of the table that attention had better read apart; a single one is no better than `rows`."""
        return () if self.loose is not None else pieces_of(self.table)

    def read(self, which: str, piece: Piece) -> torch.Tensor:
        """Rows of a piece `[groups, H, N, ...]`: where they lie if they lie together, else brought together."""
        lies = piece.step is not None
        rows = _viewed(self.arena, which, piece) if lies else self.arena.gather(which, piece.ids)
        return rows[:, :, : self.length - piece.start * self.pool.block_size]

    # ------------------------------------------------------------------ writing

    def append(self, rows: Rows) -> None:
        """Write rows behind the last one. Raises `MemoryError` where the pool is full, with nothing changed."""
        if _in_graph(rows) or (self.loose is not None and torch.is_grad_enabled()):
            if self.loose is None:
                self.loose = DenseSegment()
                if self._table.length:
                    self.loose.append(PagedRows(self._table).map(torch.clone))
            self.loose.append(rows)
            self._drop_blocks()
            return
        self._settle_loose()
        if self._table.arena is not None and self.arena.kind.position_heads < rows.positions.shape[1]:
            wide = rows.positions.shape[1]
            held = PagedRows(self._table).map(torch.clone)
            self.replace(Rows(held.keys, held.values, held.positions.expand(-1, wide, -1)))
        size, start, stop = self.pool.block_size, self._table.length, self._table.length + rows.length
        with self.pool.lock:
            arena = self._table.arena or self.pool.arena(self._kind_of(rows))
            self.pool.collect()
            batch, ids = rows.keys.shape[0], self.table if start else np.zeros((rows.keys.shape[0], 0), np.int32)
            more = -(-stop // size) - ids.shape[1]
            partial = ids[:, start // size] if start % size else ids[:0, :0]
            moved = arena.shared(partial) if len(partial) else np.zeros(0, dtype=bool)
            arena.ensure(batch * more + int(moved.sum()))
            if moved.any():
                ids = ids.copy()
                ids[moved, -1] = arena.copy(partial[moved], start % size)
            if more:
                ids = np.concatenate([ids, arena.take(batch, more, ids[:, -1] if start else None)], axis=1)
            self._table.arena, self._table.ids, self._table.length = arena, ids, stop
            arena.write(self._slots(np.arange(start, stop)), rows.tensors())

    def replace(self, rows: Rows, reserve: int = 0) -> None:
        """Hold exactly `rows` (tensors of their own)."""
        self.clear()
        if rows.length:
            self.append(rows)

    def overwrite(self, slot: torch.Tensor) -> None:
        """Move the last row of each sequence into `slot` `[B, 1, 1]`, and forget the last place."""
        if self.loose is not None:
            self.loose.overwrite(slot)
            return
        target = slot[:, 0, 0].cpu().numpy()
        size, batch, last = self.pool.block_size, np.arange(len(self.table)), self.length - 1
        with self.pool.lock:
            arena, columns = self.arena, target // size
            ids = self.table[batch, columns]
            moved = arena.shared(ids)
            if moved.any():
                new = self.table.copy()
                new[batch[moved], columns[moved]] = arena.copy(ids[moved], size)
                self._table.ids = new
            slots = self.table[batch, columns].astype(np.int64) * size + target % size
            arena.move(self._slots(np.array([last]))[:, 0], slots)
        self.crop(1)

    def mark(self, positions: torch.Tensor) -> None:
        """Rewrite the positions of the newest rows, which were just written."""
        n = positions.shape[-1]
        if self.loose is not None:
            self.loose.rows.positions[:, :, -n:].copy_(positions)
            return
        with self.pool.lock:
            self.arena.write(self._slots(np.arange(self.length - n, self.length)), {"positions": positions})

    def crop(self, n: int, seen: int | None = None) -> None:
        """Forget the last `n` rows; blocks that are left without any go back to the pool."""
        if self.loose is not None:
            self.loose.crop(n)
            return
        table = self._table
        with self.pool.lock:
            table.length = max(0, table.length - n)
            keep = -(-table.length // self.pool.block_size)
            if table.arena is not None:
                table.arena.release(table.ids[:, keep:])
            table.ids = table.ids[:, :keep].copy()

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a batch operation to the block table; no row is touched."""
        if self.loose is not None:
            self.loose.batch_map(fn)
            return
        old = self.table
        new = fn(torch.from_numpy(old)).numpy()
        with self.pool.lock:
            # Beams share nearly all of their blocks, and most entries stay as they are.
            changed = new != old if new.shape == old.shape else slice(None)
            self.arena.hold(new[changed])
            self.arena.release(old[changed])
            self._table.ids = new

    def seal(self) -> None:
        """Nothing to do: copies share every block until they write into it."""

    def clear(self) -> None:
        self.loose = None
        self._drop_blocks()

    def _drop_blocks(self) -> None:
        with self.pool.lock:
            self._table.drop()

    def _settle_loose(self) -> None:
        """Rows of a training step go to the pool when it is over."""
        if self.loose is not None:
            rows, self.loose = self.loose.rows, None
            if rows.length:
                self.append(rows.map(torch.Tensor.detach))

    def _slots(self, index: np.ndarray) -> np.ndarray:
        """Slots `[B, n]` of the rows `index` `[n]` of each sequence."""
        size = self.pool.block_size
        return self.table[:, index // size].astype(np.int64) * size + index % size

    def _kind_of(self, rows: Rows) -> Kind:
        k, v = rows.keys, rows.values
        heads = rows.positions.shape[1]
        return Kind(self.layer, k.shape[1], k.shape[3], v.shape[3], k.dtype, v.dtype, k.device, heads)


def _viewed(arena: Arena, which: str, piece: Piece) -> torch.Tensor:
    assert piece.step is not None
    return arena.view(which, int(piece.ids[0, 0]), piece.step, *piece.ids.shape)
