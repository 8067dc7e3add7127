"""Arena: the blocks of one kind (one layer of one shape), their reference counts, and who gets which."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

Ids = np.ndarray  # block ids, int32
_ONE = np.int32(1)  # of the type that is counted in, for which numpy has a fast path


class Kind(NamedTuple):
    """What blocks must have in common to lie in one arena."""

    layer: int
    heads: int
    key_dim: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device
    position_heads: int  # 1 while all heads hold the same tokens

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: keys, values and positions."""
        row = self.key_dim * self.key_dtype.itemsize + self.value_dim * self.value_dtype.itemsize
        return block_size * (self.heads * row + self.position_heads * 4)


class Arena:
    """Blocks in three buffers that grow together. The pool's lock is held by every caller that changes anything.

    A head's blocks lie next to each other, so that blocks with neighbouring ids are one run of rows that attention
    reads where it lies; `take` therefore hands out neighbours where it can. Buffers are replaced when they grow, never
    moved: who still reads the old ones reads what was there.
    """

    def __init__(self, kind: Kind, block_size: int, admit: Callable[[Arena, int, int], int]) -> None:
        self.kind = kind
        self.block_size = block_size
        self.admit = admit  # (arena, blocks needed, blocks wished for) -> blocks to add; refuses beyond `max_bytes`
        self.counts = np.zeros(0, dtype=np.int32)  # references to each block; 0: free
        self.keys, self.values, self.positions = self._buffers(0)

    @property
    def capacity(self) -> int:
        return len(self.counts)

    @property
    def free(self) -> int:
        return self.capacity - int(np.count_nonzero(self.counts))

    @property
    def block_bytes(self) -> int:
        return self.kind.block_bytes(self.block_size)

    @property
    def nbytes(self) -> int:
        return self.capacity * self.block_bytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """`keys [H, blocks, size, D]`, `values [H, blocks, size, Dv]`, `positions [H|1, blocks, size]`."""
        return {"keys": self.keys, "values": self.values, "positions": self.positions}

    # ------------------------------------------------------------------ who holds what

    def hold(self, ids: Ids) -> None:
        """One more reference for every entry of `ids`."""
        np.add.at(self.counts, ids.ravel().astype(np.intp), _ONE)

    def release(self, ids: Ids) -> None:
        """One reference less for every entry of `ids`; blocks without any are free."""
        np.subtract.at(self.counts, ids.ravel().astype(np.intp), _ONE)

    def ensure(self, count: int) -> None:
        """At least `count` free blocks. Raises `MemoryError` beyond the pool's `max_bytes`, with nothing changed."""
        short = count - self.free
        if short > 0:
            # A sixteenth more than is needed, so that a growing sequence is not copied for every block.
            self._resize(self.capacity + self.admit(self, short, max(short, self.capacity // 16)))

    def take(self, rows: int, each: int, after: Ids | None = None) -> Ids:
        """`[rows, each]` free blocks with one reference each: neighbours where possible, if may be behind `after`."""
        count = rows * each
        self.ensure(count)
        if after is not None:
            wished = after[:, None] + np.arange(1, each + 1, dtype=np.int32)
            if wished.max() < self.capacity and not self.counts[wished].any():
                if rows == 1 or len(np.unique(wished)) == count:
                    self.counts[wished] = 1
                    return wished
        free = np.flatnonzero(self.counts == 0).astype(np.int32)
        first = 0
        if count > 1:
            runs = free[count - 1 :] - free[: len(free) - count + 1] == count - 1
            first = int(runs.argmax())  # 0 where there is no run
        taken = free[first : first + count].reshape(rows, each)
        self.counts[taken] = 1
        return taken

    def shared(self, ids: Ids) -> np.ndarray:
        """Which entries of `ids` `[n]` must be copied before they are written: all but one holder of each block.

        The holder that stays is the first entry, where no other table holds the block.
        """
        counts = self.counts[ids]
        if (counts == 1).all():
            return np.zeros(len(ids), dtype=bool)
        same = ids[:, None] == ids
        stays = (same.argmax(axis=1) == np.arange(len(ids))) & (same.sum(axis=1) == counts)
        return ~stays

    def copy(self, ids: Ids, filled: int) -> Ids:
        """New blocks with the first `filled` rows of blocks `ids` `[n]`, whose references move to them."""
        new = self.take(1, len(ids))[0]
        with torch.no_grad():
            for tensor in self.tensors().values():
                for source, target in zip(ids.tolist(), new.tolist(), strict=True):
                    tensor[:, target, :filled].copy_(tensor[:, source, :filled])
        self.release(ids)
        return new

    # ------------------------------------------------------------------ rows

    def write(self, slots: np.ndarray, rows: dict[str, torch.Tensor]) -> None:
        """Write rows `[B, H|1, n, ...]` at `slots` `[B, n]` (block id * block size + offset)."""
        batch, n = slots.shape
        # Many rows at neighbouring slots are copied as one.
        run = n >= 8 * batch and bool((slots[:, -1] - slots[:, 0] == n - 1).all())
        index = None if run else self._index(slots.ravel())
        with torch.no_grad():
            for name, new in rows.items():
                buffer = getattr(self, name).flatten(1, 2)  # [H, slots, ...]
                new = new.detach()
                if index is None:
                    for row, start in zip(new, slots[:, 0].tolist(), strict=True):
                        buffer[:, start : start + n].copy_(row)
                else:
                    new = new.transpose(0, 1).to(buffer.dtype).expand(buffer.shape[0], *slots.shape, *new.shape[3:])
                    buffer.index_copy_(1, index, new.flatten(1, 2))

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the rows at slots `source` to slots `target`."""
        a, b = self._index(source), self._index(target)
        with torch.no_grad():
            for tensor in self.tensors().values():
                flat = tensor.flatten(1, 2)
                flat.index_copy_(1, b, flat.index_select(1, a))

    def gather(self, name: str, ids: Ids) -> torch.Tensor:
        """The rows of blocks `[g, c]`, in order: `[g, H, c * size, D]`, or `[g, H|1, c * size]` for positions."""
        buffer = getattr(self, name)
        heads = np.arange(buffer.shape[0], dtype=np.int64)[:, None] * buffer.shape[1]
        index = self._index((ids[:, None].astype(np.int64) + heads).ravel())
        rows = buffer.flatten(0, 1).flatten(1).index_select(0, index)
        return rows.view(ids.shape[0], buffer.shape[0], ids.shape[1] * self.block_size, *buffer.shape[3:])

    def view(self, name: str, base: int, step: int, rows: int, count: int) -> torch.Tensor:
        """The same for blocks `base + step * row + column`, where they lie."""
        # `data`: later writes to other blocks are none of the business of a training step that read these.
        buffer = getattr(self, name).data
        row = buffer.stride(1)  # of a block
        shape = (rows, buffer.shape[0], count * self.block_size, *buffer.shape[3:])
        strides = (step * row, buffer.stride(0), *buffer.stride()[2:])
        return buffer.as_strided(shape, strides, base * row)

    # ------------------------------------------------------------------ buffers

    def trim(self) -> None:
        """Give back the free blocks behind the last one in use."""
        used = np.flatnonzero(self.counts)
        keep = int(used[-1]) + 1 if len(used) else 0
        if keep < self.capacity:
            self._resize(keep)

    def _resize(self, capacity: int) -> None:
        old, keep = self.tensors(), min(capacity, self.capacity)
        new = self._buffers(capacity)
        with torch.no_grad():
            for tensor, before in zip(new, old.values(), strict=True):
                tensor[:, :keep].copy_(before[:, :keep])
        self.keys, self.values, self.positions = new
        self.counts = np.concatenate([self.counts[:keep], np.zeros(capacity - keep, dtype=np.int32)])

    def _buffers(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, size = self.kind, self.block_size
        # Buffers made under `torch.inference_mode` could not be written outside of it.
        with torch.inference_mode(False):
            return (
                torch.empty(k.heads, capacity, size, k.key_dim, dtype=k.key_dtype, device=k.device),
                torch.empty(k.heads, capacity, size, k.value_dim, dtype=k.value_dtype, device=k.device),
                torch.empty(k.position_heads, capacity, size, dtype=torch.int32, device=k.device),
            )

    def _index(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.kind.device)
