"""BlockPool: fixed-size blocks of rows that several caches draw from and share."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from .arena import Arena, Ids, Kind


class Table:
    """One layer's block table: which blocks hold the rows of each sequence of the batch."""

    __slots__ = ("arena", "ids", "length", "__weakref__")

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.ids: Ids = np.zeros((0, 0), dtype=np.int32)  # [B, n]
        self.length = 0  # rows of each sequence

    def drop(self) -> None:
        """Give everything back (the pool's lock is held)."""
        if self.arena is not None:
            self.arena.release(self.ids)
        self.arena, self.ids, self.length = None, self.ids[:0, :0], 0


class BlockPool:
    """Fixed-size blocks for the rows of caches: `KVCache(model, pool=pool)`. Lossless.

    A block holds `block_size` tokens of one sequence of one layer: keys, values, positions. Reordering beams, repeating
    a batch and copying a cache copy block tables and count references; a block that is shared is copied when somebody
    writes into it, and only then. Each sequence wastes less than one block per layer (vLLM, arXiv 2309.06180).
    Several caches, of several models and threads, may draw from one pool; their blocks come back when they are reset
    or dropped. Bytes per token, KV head and layer: those of full precision, plus 4 per token for its position and
    `4 / block_size` for the table.

    Args:
        block_size: tokens per block.
        max_bytes: most bytes that all blocks together may take (None: no bound). Buffers grow by copying, one layer at
            a time, so a layer's old buffer stands beside the new one for a moment.

    Raises:
        ValueError: sizes that are no positive whole numbers.
        MemoryError: (from a cache that draws) more blocks are needed than `max_bytes` allows.
    """

    def __init__(self, block_size: int = 64, max_bytes: int | None = None) -> None:
        from ..policies.base import check_positive  # policies import segments, and those the pool

        check_positive("block_size", block_size)
        check_positive("max_bytes", max_bytes, optional=True)
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self._arenas: dict[Kind, Arena] = {}
        self._tables: dict[int, Table] = {}
        # Tables whose owner is gone. Garbage may be collected anywhere, in the middle of an operation too, so what is
        # collected is only noted here, and given back when the lock is taken next.
        self._gone: deque[Table] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockPool:
        return self  # copies of a cache draw from the same pool

    def __reduce__(self) -> Any:
        raise TypeError("a BlockPool belongs to its process and cannot be pickled; save caches with `cache.save(path)`")

    def table(self, owner: Any) -> Table:
        """An empty table, given back when `owner` is collected."""
        table = Table()
        with self.lock:
            self._tables[id(table)] = table
        weakref.finalize(owner, self._gone.append, table).atexit = False
        return table

    def arena(self, kind: Kind) -> Arena:
        """The blocks of a kind."""
        with self.lock:
            self.collect()
            if kind not in self._arenas:
                self._arenas[kind] = Arena(kind, self.block_size, self._admit)
            return self._arenas[kind]

    def collect(self) -> None:
        """Take back the blocks of caches that are gone."""
        with self.lock:
            while self._gone:
                table = self._gone.popleft()
                table.drop()
                self._tables.pop(id(table), None)

    def _admit(self, arena: Arena, needed: int, wished: int) -> int:
        """How many blocks to add to an arena."""
        if self.max_bytes is None:
            return wished
        for _ in range(2):
            room = (self.max_bytes - sum(a.nbytes for a in self._arenas.values())) // arena.block_bytes
            if room >= needed:
                return min(room, wished)
            for other in self._arenas.values():
                if other is not arena:
                    other.trim()
        raise MemoryError(
            f"{needed} more blocks of {arena.block_bytes:,} bytes are needed, but `max_bytes` ({self.max_bytes:,}) "
            f"leaves room for {max(0, room)}: reset or drop caches that draw from this pool, or make it larger"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        with self.lock:
            return sum(arena.nbytes for arena in self._arenas.values())

    def trim(self) -> None:
        """Give the memory of free blocks back, as far as no block in use lies behind them."""
        with self.lock:
            self.collect()
            for arena in self._arenas.values():
                arena.trim()

    def stats(self) -> dict[str, int]:
        """What the pool holds now.

        `blocks` = `used` + `free`; `shared` of the used ones are referred to more than once. `sequences` counts rows of
        a batch times layers, over all caches; `waste_tokens` are places in used blocks that hold no token, fewer than
        `block_size` for each of the sequences. `bytes` are those of all blocks, `used_bytes` those of used ones.
        """
        with self.lock:
            self.collect()
            arenas = list(self._arenas.values())
            filled = {id(a): np.zeros(a.capacity, dtype=np.int64) for a in arenas}
            sequences = 0
            for table in self._tables.values():
                if table.arena is None or not table.ids.size:
                    continue
                full = table.length // self.block_size
                tokens = filled[id(table.arena)]
                tokens[table.ids[:, :full]] = self.block_size
                rest = table.ids[:, full:]
                np.maximum.at(tokens, rest, table.length - full * self.block_size)
                sequences += len(table.ids)
            used = sum(a.capacity - a.free for a in arenas)
            return {
                "block_size": self.block_size,
                "blocks": sum(a.capacity for a in arenas),
                "used": used,
                "free": sum(a.free for a in arenas),
                "shared": sum(int((a.counts > 1).sum()) for a in arenas),
                "sequences": sequences,
                "waste_tokens": used * self.block_size - sum(int(tokens.sum()) for tokens in filled.values()),
                "bytes": sum(a.nbytes for a in arenas),
                "used_bytes": sum((a.capacity - a.free) * a.block_bytes for a in arenas),
            }

    def __repr__(self) -> str:
        s = self.stats()
        return (
            f"BlockPool(block_size={self.block_size}): {s['used']} of {s['blocks']} blocks in use, {s['bytes']:,} bytes"
        )
