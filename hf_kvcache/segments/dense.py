"""DenseSegment: rows in full precision, in buffers that grow in place.

A row is one token of one KV head: key, value, position and (for score-based policies) a score. All per-row tensors
are kept in one table and every operation acts on the whole table, so nothing can be moved without the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

EMPTY = -1  # the position of a row that holds nothing: padding, or a free slot


def capacity_for(rows: int) -> int:
    """Rows allocated when a buffer must hold `rows`: a sixteenth more, at least 32."""
    return rows + max(32, rows // 16)


class Rows:
    """A table of rows: `keys [B,H,N,D]`, `values [B,H,N,Dv]`, `positions [B,H|1,N]` int32, `scores [B,H,N]` float32.

    `positions` has one head while all heads hold the same tokens. `scores` exists only where a policy asks for it.
    """

    in_order = True  # by position, empty rows first

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor | None = None,
    ) -> None:
        self.keys = keys
        self.values = values
        self.positions = positions
        self.scores = scores

    def tensors(self) -> dict[str, torch.Tensor]:
        table = {"keys": self.keys, "values": self.values, "positions": self.positions}
        if self.scores is not None:
            table["scores"] = self.scores
        return table

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        return Rows(**{name: fn(tensor) for name, tensor in self.tensors().items()})

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def none(self) -> Rows:
        """A table of the same kind without rows."""
        return self.map(lambda t: t[:, :, :0].clone())

    def __deepcopy__(self, memo: dict[int, object]) -> Rows:
        # Non-leaf tensors of a training step have no deepcopy of their own.
        return self.map(lambda t: t.detach().clone())

    def gather(self, index: torch.Tensor) -> Rows:
        """Rows `index` `[B, H|1, K]` of each head, as new tensors. One index head serves all heads."""
        heads = self.keys.shape[1]

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            idx = index
            if tensor.ndim == 4:
                idx = index.expand(-1, heads, -1).unsqueeze(-1).expand(-1, -1, -1, tensor.shape[-1])
                return tensor.gather(2, idx)
            wide = max(tensor.shape[1], index.shape[1])
            return tensor.expand(-1, wide, -1).gather(2, idx.expand(-1, wide, -1))

        return self.map(pick)


class DenseSegment:
    """Growing full-precision storage of one layer. Lossless.

    Bytes per row and KV head: `(head_dim + value_dim) * element_size + 4` (position) `+ 4` (score, if any); positions
    are shared by all heads until heads begin to hold different tokens. `capacity_for` bounds the slack.
    """

    def __init__(self) -> None:
        self._table: Rows | None = None
        self.length = 0
        self._step: int | None = None  # rows to grow by, once a policy has decided how many there should be

    @classmethod
    def of(cls, rows: Rows) -> DenseSegment:
        """A segment of these very tensors, which are not to be written."""
        segment = cls()
        segment._table, segment.length = rows, rows.length
        return segment

    @property
    def rows(self) -> Rows:
        """The rows held, as views of the buffers."""
        assert self._table is not None
        return self._table.map(lambda t: t[:, :, : self.length])

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values held, as views of the buffers."""
        assert self._table is not None
        return self._table.keys.narrow(2, 0, self.length), self._table.values.narrow(2, 0, self.length)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, KV heads, key size, value size)."""
        assert self._table is not None
        keys = self._table.keys
        return keys.shape[0], keys.shape[1], keys.shape[3], self._table.values.shape[3]

    @property
    def element_size(self) -> int:
        assert self._table is not None
        return self._table.keys.element_size()

    @property
    def device(self) -> torch.device:
        assert self._table is not None
        return self._table.keys.device

    @property
    def is_empty(self) -> bool:
        return self._table is None or self.length == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, slack included."""
        return sum(self.storages().values())

    def storages(self) -> dict[int, int]:
        """Address and bytes of each buffer."""
        return storages_of([] if self._table is None else list(self._table.tensors().values()))

    def append(self, rows: Rows) -> None:
        """Write rows after the last one; grow the buffers where they are full."""
        n = rows.length
        if self._table is not None:
            self._match(rows)
        if _in_graph(rows) or (self._table is not None and _in_graph(self._table)):
            self._append_in_graph(rows)
            return
        if self._table is None:
            self._allocate(rows, capacity_for(n))
        elif self.length + n > self._table.length:
            needed = self.length + n
            self._reallocate(capacity_for(needed) if self._step is None else needed + self._step)
        elif self._table.keys.is_inference() and not torch.is_inference_mode_enabled():
            # Written under `torch.inference_mode`, such buffers cannot be written outside of it.
            self._reallocate(self._table.length)
        assert self._table is not None
        held = self._table.tensors()
        for name, tensor in rows.tensors().items():
            held[name].narrow(2, self.length, n).copy_(tensor)
        self.length += n

    def _append_in_graph(self, rows: Rows) -> None:
        # A training step may still need the old buffer, so nothing is written into it.
        if self._table is not None and self.length:
            held = self.rows.tensors()
            rows = Rows(**{name: torch.cat([held[name], new], dim=2) for name, new in rows.tensors().items()})
        self._table, self.length = rows, rows.length

    def replace(self, rows: Rows, reserve: int = 0) -> None:
        """Hold exactly `rows` (tensors of their own), with room for `reserve` more, and grow by that from now on."""
        self._step = max(1, reserve)
        if rows.length and not reserve:
            self._table = rows.map(lambda t: t if t.is_contiguous() and _owns(t) else t.contiguous().clone())
            self.length = rows.length
            return
        self._table, self.length = None, 0
        self._allocate(rows, rows.length + reserve)
        self.append(rows)

    def overwrite(self, slot: torch.Tensor) -> None:
        """Move the last row of each head into `slot` `[B, H|1, 1]`, and forget the last place. No allocation."""
        assert self._table is not None
        last = self.length - 1
        heads = self._table.keys.shape[1]
        batch = torch.arange(slot.shape[0], device=slot.device)[:, None]
        head = torch.arange(heads, device=slot.device)[None, :]
        for tensor in self._table.tensors().values():
            wide = slot[..., 0] if tensor.shape[1] == slot.shape[1] else slot[..., 0].expand(-1, tensor.shape[1])
            tensor[batch, head[:, : tensor.shape[1]], wide] = tensor[:, :, last].clone()
        self.length = last

    def widen_positions(self) -> None:
        """Give every head positions of its own (before heads begin to differ)."""
        assert self._table is not None
        heads = self._table.keys.shape[1]
        if self._table.positions.shape[1] != heads:
            self._table.positions = self._table.positions.expand(-1, heads, -1).contiguous()

    def crop(self, n: int) -> None:
        """Forget the last `n` rows."""
        self.length = max(0, self.length - n)

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a batch operation (select, repeat, reorder) to every per-row tensor."""
        if self._table is not None:
            self._table = self._table.map(fn)

    def mapped(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> DenseSegment:
        """A new segment with `fn` applied to every per-row tensor; this one stays as it is."""
        twin = DenseSegment()
        if self._table is not None:
            twin._table, twin.length = self.rows.map(fn), self.length
        return twin

    def head(self, length: int) -> DenseSegment:
        """A segment of the first `length` rows, on the same buffers."""
        twin = DenseSegment()
        twin._table, twin.length = self._table, length
        return twin

    def clear(self) -> None:
        self._table, self.length, self._step = None, 0, None

    def _allocate(self, like: Rows, capacity: int) -> None:
        def empty(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            shape[2] = capacity
            return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

        self._table = like.map(empty)
        self.length = 0

    def _reallocate(self, capacity: int) -> None:
        old, length = self.rows, self.length
        self._allocate(old, capacity)
        assert self._table is not None
        held = self._table.tensors()
        for name, tensor in old.tensors().items():
            held[name][:, :, :length].copy_(tensor)
        self.length = length

    def _match(self, rows: Rows) -> None:
        """Bring the head count of positions in line with what is held."""
        assert self._table is not None
        mine, theirs = self._table.positions.shape[1], rows.positions.shape[1]
        if mine < theirs:
            self.widen_positions()
        elif mine > theirs:
            rows.positions = rows.positions.expand(-1, mine, -1)


def storages_of(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of the storage of each tensor; what several of them share is there once."""
    held = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


def _in_graph(rows: Rows) -> bool:
    return torch.is_grad_enabled() and (rows.keys.requires_grad or rows.values.requires_grad)


def _owns(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
