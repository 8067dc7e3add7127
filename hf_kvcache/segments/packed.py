"""PackedStore: the rows of one layer, most of them quantized.

    front (exact)  |  packed  |  tail (exact)

The first tokens of each batch row stand in front, the newest in the tail; what lies between is packed, a block at a
time, when it leaves the tail. Batch rows of different lengths (left padding) pack at their own pace, aligned to their
own first token, so a padded row is written as it would be alone; slots that a row does not use have the position
`EMPTY`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..ops.decode_attention import PackedRows
from ..ops.decode_attention.cpu import Steady
from ..ops.packed import Packed
from ..ops.quantize_pack import quantize_pack
from .dense import EMPTY, DenseSegment, Rows
from .side import Side, clear_codes, half_for, tiles_for

if TYPE_CHECKING:
    from ..codecs.base import LayerCodec

LAST = torch.iinfo(torch.int32).max


class LazyRows(Rows):
    """A table whose keys and values are decoded only where somebody reads them."""

    def __init__(self, store: PackedStore, positions: torch.Tensor, scores: torch.Tensor | None) -> None:
        self._store = store
        self._read: dict[str, torch.Tensor] = {}
        self.positions = positions
        self.scores = scores
        self.in_order = len(set(store.used)) <= 1 and not store.is_ragged

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return self._get("keys")

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self._get("values")

    @property
    def length(self) -> int:
        return self.positions.shape[-1]

    def _get(self, which: str) -> torch.Tensor:
        if which not in self._read:
            self._read[which] = self._store.decoded(which)
        return self._read[which]


class PackedStore:
    """Rows of one layer in the codec's formats, exact at both ends. Lossy in the middle.

    The interface is that of `Chain`; `compress` packs what has left the exact window, and `attended` hands the parts to
    attention as they lie. Bytes: `LayerCodec.packed_bytes`, the exact rows, and 4 for the position of each row.
    """

    staged = False  # whether packed rows are handed out in buffers that other layers use too

    def __init__(self, make: Callable[[int, int], LayerCodec]) -> None:
        self.make = make  # (key size, value size) -> the codec of this layer
        self._codec: LayerCodec | None = None
        self.clear()

    @property
    def codec(self) -> LayerCodec:
        assert self._codec is not None
        return self._codec

    def clear(self) -> None:
        self.tail = DenseSegment()
        self.front: Rows | None = None
        self.keys: Side | None = None
        self.values: Side | None = None
        self.slot_positions: torch.Tensor | None = None  # [B, H|1, slots allocated]
        self.slot_scores: torch.Tensor | None = None
        self.mean: torch.Tensor | None = None  # [B, H, D] float16, where the codec centres keys
        self.used: list[int] = []  # slots of each batch row
        self.fronts: list[int] = []  # front rows of each batch row
        self.begun: list[int] = []  # 1 where a batch row has statistics, from the first rows that it packed
        self.is_ragged = False  # some row of the tail may be empty, or out of order
        self._turns: dict[tuple[str, torch.device], torch.Tensor] = {}
        # What attention was handed last, and the slots and buffers that it is made of.
        self._attended: tuple[int, tuple[Any, ...], PackedRows] | None = None
        # Whether some buffer may have been made under `torch.inference_mode`.
        self._frozen = torch.is_inference_mode_enabled()

    # ------------------------------------------------------------------ what it holds

    @property
    def slots(self) -> int:
        """Packed slots of the batch row that has most."""
        return max(self.used, default=0)

    @property
    def front_length(self) -> int:
        return 0 if self.front is None else self.front.length

    @property
    def has_packed(self) -> bool:
        return self.slots > 0

    @property
    def in_parts(self) -> bool:
        """Whether some rows are not in the tail."""
        return self.has_packed or self.front is not None

    @property
    def packs(self) -> bool:
        """Whether some rows are packed."""
        return self.has_packed

    @property
    def has_holes(self) -> bool:
        """Whether some packed or front slot holds no token."""
        tables = [] if self.front is None else [self.front.positions]
        if self.has_packed and self.slot_positions is not None:
            tables.append(self.slot_positions[:, :, : self.slots])
        return any(bool((table == EMPTY).any()) for table in tables)

    @property
    def length(self) -> int:
        return self.front_length + self.slots + self.tail.length

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    def _tensors(self) -> list[torch.Tensor]:
        found = [t for t in (self.slot_positions, self.slot_scores, self.mean) if t is not None]
        for side in (self.keys, self.values):
            found += [] if side is None else list(side.tensors().values())
        return found + ([] if self.front is None else list(self.front.tensors().values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, slack included."""
        return self.tail.nbytes + sum(t.untyped_storage().nbytes() for t in self._tensors())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, KV heads, key size, value size)."""
        return self.tail.shape

    @property
    def element_size(self) -> int:
        """Bytes of one element of an exact row."""
        return self.tail.element_size

    def _joined(self, name: str) -> torch.Tensor:
        """Positions or scores of all rows."""
        parts = []
        tail = self.tail.rows.tensors()[name]
        if self.front is not None:
            parts.append(self.front.tensors()[name])
        if self.has_packed:
            table = self.slot_positions if name == "positions" else self.slot_scores
            assert table is not None
            parts.append(table[:, :, : self.slots])
        if not parts:
            return tail
        parts.append(tail)
        heads = max(part.shape[1] for part in parts)
        return torch.cat([part.expand(-1, heads, -1) for part in parts], dim=2)

    @property
    def positions(self) -> torch.Tensor:
        """`[B, H|1, N]` positions of all rows."""
        return self._joined("positions")

    @property
    def rows(self) -> Rows:
        """All rows in order; packed ones are decoded where they are read."""
        if not self.has_packed and self.front is None:
            return self.tail.rows
        scores = None if self.tail.rows.scores is None else self._joined("scores")
        return LazyRows(self, self.positions, scores)

    @property
    def parts(self) -> list[Rows]:
        return [] if self.is_empty else [self.rows]

    def set_scores(self, scores: torch.Tensor) -> None:
        """Write back scores of all rows `[B, H, N]` that were changed in a copy."""
        f, s = self.front_length, self.slots
        if self.front is not None and self.front.scores is not None:
            self.front.scores.copy_(scores[..., :f])
        if self.slot_scores is not None:
            self.slot_scores[..., :s].copy_(scores[..., f : f + s])
        tail = self.tail.rows.scores
        assert tail is not None
        tail.copy_(scores[..., f + s :])

    def decoded(self, which: str) -> torch.Tensor:
        """All keys or values `[B, H, N, D]` as full numbers."""
        parts = [] if self.front is None else [getattr(self.front, which)]
        tail = getattr(self.tail.rows, which)
        if self.has_packed:
            side = self._sides()[("keys", "values").index(which)]
            parts.append(self._undo(which, side.decoded(self.slots)).to(tail.dtype))
        return torch.cat([*parts, tail], dim=2)

    def _undo(self, which: str, x: torch.Tensor) -> torch.Tensor:
        """Decoded rows as they were before the linear maps."""
        turn = self._turn(which)
        if turn is not None:
            x = torch.matmul(x, turn.transpose(-1, -2))
        if which == "keys" and self.mean is not None:
            x = x + self.mean.float()[:, :, None]
        return x

    def _mapped(self, which: str, x: torch.Tensor) -> torch.Tensor:
        """Exact rows as they are coded: the reverse of `_undo`."""
        x = x.float()
        if which == "keys" and self.mean is not None:
            x = x - self.mean.float()[:, :, None]
        turn = self._turn(which)
        return x if turn is None else torch.matmul(x, turn)

    def _turn(self, which: str) -> torch.Tensor | None:
        turn = self.codec.key_turn if which == "keys" else self.codec.value_turn
        if turn is None:
            return None
        device = self.tail.device
        if turn.device != device:
            turn = self._turns.setdefault((which, device), turn.to(device))
        return turn

    def attended(self) -> tuple[Rows | None, PackedRows | None, tuple[torch.Tensor, torch.Tensor]]:
        """Front, packed rows, and the keys and values of the tail, as attention takes them."""
        slots = self.slots
        if not slots:
            return self.front, None, self.tail.pair
        keys, values = self._sides()
        assert keys.packed is not None and values.packed is not None
        made_of = (keys.packed, values.packed, keys.base, values.base, self.mean)
        if self._attended is None or self._attended[0] != slots or not _same(self._attended[1], made_of):
            packed = PackedRows(
                keys.packed,
                values.packed,
                keys.fmt,
                values.fmt,
                slots,
                keys.half,
                self._turn("keys"),
                key_mean=self.mean,
                value_turn=self._turn("values"),
                key_base=keys.base,
                value_base=values.base,
            )
            steady = Steady.of(packed, keys.dim, values.dim, self.tail.pair[0].dtype)
            packed = packed._replace(steady=steady)
            if not self.staged:
                self._attended = (slots, made_of, packed)
            return self.front, packed, self.tail.pair
        return self.front, self._attended[2], self.tail.pair

    def _sides(self) -> tuple[Side, Side]:
        """Packed keys and values, where they are to be read."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _new_side(self, role: str, dim: int, device: torch.device) -> Side:
        fmt = self.codec.key_format if role == "keys" else self.codec.value_format
        return Side(fmt, role, half_for(device), dim)

    # ------------------------------------------------------------------ writing

    def append(self, rows: Rows) -> None:
        """New rows go to the tail, exact."""
        if rows.length > 1:
            self.is_ragged = True  # padding may stand between
        self.meet(rows)
        self._thaw()
        self.tail.append(rows)

    def _before_writing(self) -> None:
        """Before buffers are made: remember whether that is under `torch.inference_mode` (asking each takes longer).

        Views of the old ones are let go, or the packed rows of all layers would be there twice until the next step.
        """
        self._attended = None
        self._frozen = self._frozen or torch.is_inference_mode_enabled()

    def _thaw(self) -> None:
        """Copy what was packed under `torch.inference_mode`, which cannot be written or trained on outside of it."""
        if self._frozen and not torch.is_inference_mode_enabled():
            self._frozen = False
            self.batch_map(torch.clone, lists=False)

    def replace(self, rows: Rows, reserve: int = 0) -> None:
        """Hold exactly `rows`, none of them packed yet."""
        self.clear()
        self.meet(rows)
        self.is_ragged = True
        self.tail.replace(rows, reserve)

    def meet(self, rows: Rows) -> None:
        """Take the sizes from the first rows."""
        if self._codec is None:
            self._codec = self.make(rows.keys.shape[-1], rows.values.shape[-1])
        if not self.used:
            self.used = [0] * rows.keys.shape[0]
            self.fronts = [0] * rows.keys.shape[0]
            self.begun = [0] * rows.keys.shape[0]

    def mark(self, positions: torch.Tensor) -> None:
        """Rewrite the positions of the newest rows."""
        self.is_ragged = True
        self.tail.rows.positions[:, :, -positions.shape[-1] :].copy_(positions)

    def compress(self, reserve: int = 0) -> bool:
        """Pack every block that has left the exact window. Whether anything was packed.

        `reserve` is the least number of free rows that the tail is left with.
        """
        c = self._codec
        if c is None or self.tail.length < c.residual_length + c.block:
            return False  # most steps end here
        missing = [c.num_sink_tokens - have for have in self.fronts]
        if self.tail.length - c.residual_length - min(missing) < c.block:
            return False
        rows = self.tail.rows
        if rows.keys.requires_grad:
            return False  # a training step reads the rows that it wrote
        batch, n = rows.keys.shape[0], rows.length
        live, order = [n] * batch, None
        if self.is_ragged:
            live = (rows.positions[:, 0] != EMPTY).sum(-1).tolist()
            order = rows.positions.argsort(dim=-1, stable=True)  # empty ones first, then by age
        blocks = [max(0, (live[b] - c.residual_length - missing[b]) // c.block) for b in range(batch)]
        if not any(blocks):
            return False
        if order is not None:
            rows = rows.gather(order)
        plans: dict[tuple[int, int, int, int, int], list[int]] = {}
        for b in range(batch):
            if blocks[b]:
                plan = (n - live[b], missing[b], blocks[b] * c.block, self.used[b], self.begun[b])
                plans.setdefault(plan, []).append(b)
        most = max(slot + count for (_, _, count, slot, _) in plans)
        self.reserve(rows, max(most, self.slots))
        left = list(live)
        for (start, sinks, count, slot, begun), members in plans.items():
            part: slice | torch.Tensor = slice(None)
            if len(members) < batch:
                part = torch.tensor(members, device=rows.keys.device)
            mine = rows.map(lambda t, part=part: t[part])  # type: ignore[misc]
            if sinks:
                self._to_front(part, mine, start, c.num_sink_tokens - sinks, sinks)
            self._pack(part, mine, start, start + sinks, count, slot, not begun)
            for b in members:
                self.begun[b] = 1
                self.used[b] = slot + count
                self.fronts[b] = c.num_sink_tokens
                left[b] -= sinks + count
        longest = max(left)
        kept = rows.map(lambda t: t[:, :, n - longest :])
        if min(left) < longest:
            index = torch.arange(longest, device=rows.keys.device)
            gone = index[None] < longest - torch.tensor(left, device=rows.keys.device)[:, None]
            kept.positions = kept.positions.masked_fill(gone[:, None], EMPTY)
        self.tail.replace(kept, max(reserve, c.block))
        self.is_ragged = min(left) < longest
        return True

    def reserve(self, rows: Rows, slots: int) -> None:
        """Room for `slots` slots in every table of packed rows."""
        self._before_writing()
        batch, heads = rows.keys.shape[:2]
        device = rows.keys.device
        if self.keys is None or self.values is None:
            self.keys = self._new_side("keys", rows.keys.shape[-1], device)
            self.values = self._new_side("values", rows.values.shape[-1], device)
        tiles = self.keys.tiles
        if slots > tiles * 2 * self.keys.half:
            tiles = tiles_for(slots, self.keys.half)
        self.keys.reserve(batch, heads, tiles, device)
        self.values.reserve(batch, heads, tiles, device)
        room = tiles * 2 * self.keys.half
        wide = rows.positions.shape[1]
        if self.slot_positions is None or self.slot_positions.shape[2] < room or self.slot_positions.shape[1] < wide:
            self.slot_positions = grown(self.slot_positions, (batch, wide, room), EMPTY, torch.int32, device)
        if rows.scores is not None and (self.slot_scores is None or self.slot_scores.shape[2] < room):
            self.slot_scores = grown(self.slot_scores, (batch, heads, room), 0.0, torch.float32, device)

    def _to_front(self, part: slice | torch.Tensor, rows: Rows, start: int, have: int, count: int) -> None:
        """Move `count` first rows of some batch rows to the front, behind the `have` that are there."""
        self._before_writing()
        if self.front is None:
            total, batch = self.codec.num_sink_tokens, len(self.used)

            def empty(t: torch.Tensor) -> torch.Tensor:
                return t.new_zeros(batch, t.shape[1], total, *t.shape[3:])

            self.front = rows.map(empty)
            self.front.positions.fill_(EMPTY)
        if self.front.positions.shape[1] < rows.positions.shape[1]:
            self.front.positions = self.front.positions.expand(-1, rows.positions.shape[1], -1).contiguous()
        held = self.front.tensors()
        for name, tensor in rows.tensors().items():
            held[name][part, :, have : have + count] = tensor[:, :, start : start + count].to(held[name].dtype)

    def _pack(
        self,
        part: slice | torch.Tensor,
        rows: Rows,
        oldest: int,
        start: int,
        count: int,
        slot: int,
        first_rows: bool,
    ) -> None:
        assert self.keys is not None and self.values is not None and self.slot_positions is not None
        stop = start + count
        keys = rows.keys[:, :, start:stop].float()
        if self.codec.centre_keys:
            # The exact window counts too, but nothing beyond it: a draft that came along leaves no trace.
            every = rows.keys[:, :, oldest : stop + self.codec.residual_length]
            keys = keys - self._mean_of(part, every, first_rows)[:, :, None]
        for side, x in ((self.keys, keys), (self.values, rows.values[:, :, start:stop].float())):
            turn = self._turn(side.role)
            x = x if turn is None else torch.matmul(x, turn)
            packed = quantize_pack(x, side.fmt, side.role, side.half, slot % (2 * side.half))
            side.write(part, slot, packed, first_rows)
        self.slot_positions[part, :, slot : slot + count] = rows.positions[:, :, start:stop]
        if self.slot_scores is not None and rows.scores is not None:
            self.slot_scores[part, :, slot : slot + count] = rows.scores[:, :, start:stop]

    def _mean_of(self, part: slice | torch.Tensor, every: torch.Tensor, first_rows: bool) -> torch.Tensor:
        """`[b, H, D]`: the mean that the keys of these batch rows are coded around, from the rows first at hand."""
        if self.mean is None:
            heads, dim = every.shape[1], every.shape[3]
            self.mean = every.new_zeros(len(self.used), heads, dim, dtype=torch.float16)
        if first_rows:
            self.mean[part] = every.float().mean(2).half()
        return self.mean[part].float()

    # ------------------------------------------------------------------ policies

    def select(self, rows: Rows, index: torch.Tensor, filled: torch.Tensor | None, reserve: int) -> None:
        """Keep the rows `index` `[B, H|1, K]` of all rows; slots that are not `filled` become empty.

        Rows of a codec that is `per_token` move as they are; others are decoded, and coded again when they leave the
        exact window.
        """
        self._before_writing()
        positions = (
            rows.positions.gather(-1, index.expand(-1, max(rows.positions.shape[1], index.shape[1]), -1))
            if rows.positions.shape[1] >= index.shape[1]
            else rows.positions.expand(-1, index.shape[1], -1).gather(-1, index)
        )
        if filled is not None:
            positions = positions.masked_fill(~filled.expand_as(positions), EMPTY)
        order = positions.argsort(dim=-1, stable=True)  # empty ones first, then by age
        index = index.expand(-1, order.shape[1], -1).gather(-1, order)
        positions = positions.gather(-1, order)
        kept = rows.gather(index)
        kept.positions = positions
        if kept.scores is not None:
            kept.scores = kept.scores.masked_fill((positions == EMPTY).expand_as(kept.scores), 0.0)
        if not (self.has_packed and self.codec.per_token):
            self.replace(kept, reserve)
            return
        self._select_codes(rows, kept, index, reserve)

    def _select_codes(self, rows: Rows, kept: Rows, index: torch.Tensor, reserve: int) -> None:
        """`select` for rows that are complete in themselves: codes are moved, not made again."""
        assert self.keys is not None and self.values is not None
        heads = kept.keys.shape[1]
        index = index.expand(-1, heads, -1)
        f, s = self.front_length, self.slots
        live = (kept.positions[:, 0] != EMPTY).sum(-1).tolist()
        sinks, residual, block = self.codec.num_sink_tokens, self.codec.residual_length, self.codec.block
        joined: dict[str, Packed] = {}
        for side in (self.keys, self.values):
            ends = [] if self.front is None else [getattr(self.front, side.role)]
            exact = torch.cat([*ends, getattr(self.tail.rows, side.role)], dim=2)
            joined[side.role] = side.joined(self._mapped(side.role, exact), f, s)
        mean, begun = self.mean, self.begun
        halves = {"keys": self.keys, "values": self.values}
        n = kept.length
        counts = [max(0, (count - residual - sinks) // block * block) for count in live]
        if not any(counts):
            self.replace(kept, reserve)
            return
        self.clear()
        self.used, self.fronts = counts, [min(sinks, count) if c else 0 for count, c in zip(live, counts, strict=True)]
        self.mean, self.begun = mean, begun
        self.tail.replace(kept, reserve)
        self.keys, self.values = halves["keys"], halves["values"]
        slots = max(counts)
        batch = len(live)
        device = kept.keys.device
        starts = torch.tensor(
            [n - count + front_ for count, front_ in zip(live, self.fronts, strict=True)], device=device
        )
        take = starts[:, None] + torch.arange(slots, device=device)[None]
        inside = torch.arange(slots, device=device)[None] < torch.tensor(counts, device=device)[:, None]
        take = take.clamp(max=n - 1)
        for role, rows_ in joined.items():
            halves[role].take(rows_, index.gather(2, take[:, None].expand(-1, heads, -1)))
            # What shorter rows gathered beyond their own is in the way of blocks that are merged in later.
            clear_codes(halves[role], self.used, [slots] * batch)
        self.reserve(kept, slots)
        assert self.slot_positions is not None
        where = take[:, None].expand(-1, kept.positions.shape[1], -1)
        self.slot_positions[:, :, :slots] = kept.positions.gather(2, where).masked_fill(~inside[:, None], EMPTY)
        if self.slot_scores is not None and kept.scores is not None:
            self.slot_scores[:, :, :slots] = kept.scores.gather(2, take[:, None].expand(-1, heads, -1))
        for b in range(batch):
            part = torch.tensor([b], device=device)
            mine = kept.map(lambda t, part=part: t[part])  # type: ignore[misc]
            if self.fronts[b]:
                self._to_front(part, mine, n - live[b], 0, self.fronts[b])
            if counts[b] and not begun[b]:
                # Its first packed rows: all of them are still exact, and give it statistics of its own.
                start = n - live[b]
                self._pack(part, mine, start, start + self.fronts[b], counts[b], 0, first_rows=True)
                self.begun[b] = 1
        left = [count - used - f_ for count, used, f_ in zip(live, self.used, self.fronts, strict=True)]
        longest = max(left)
        tail = kept.map(lambda t: t[:, :, n - longest :])
        gone = torch.arange(longest, device=device)[None] < longest - torch.tensor(left, device=device)[:, None]
        tail.positions = tail.positions.masked_fill(gone[:, None], EMPTY)
        self.tail.replace(tail, max(reserve, block))
        self.is_ragged = min(left) < longest

    def overwrite(self, slot: torch.Tensor) -> None:
        """Move the last row of each head into `slot` `[B, H|1, 1]`, and forget the last place.

        The row that has left the exact window is written to a packed slot, and the last row takes its place.
        """
        f, s = self.front_length, self.slots
        tail = self.tail.rows
        heads = tail.keys.shape[1]
        if not s and not f:
            self.is_ragged = True
            self.tail.overwrite(slot)
            return
        slot = slot.expand(-1, heads, -1)
        behind = slot >= f + s
        # A batch row that still has room takes the new row as it would alone: it stays in the tail.
        found = self.positions.expand(-1, heads, -1).gather(-1, slot)[..., 0] == EMPTY
        growing = found.any(-1)
        ages = tail.positions[:, :, :-1].masked_fill(tail.positions[:, :, :-1] == EMPTY, LAST)
        oldest = ages.argmin(dim=-1, keepdim=True).expand(-1, heads, -1)
        place = torch.where(behind, slot - f - s, oldest)
        place = torch.where(growing[:, None, None], tail.length - 1, place)
        leaving = tail.gather(place)
        ahead = (slot[..., 0] < f) & ~growing[:, None]
        packed = ~behind[..., 0] & (slot[..., 0] >= f) & ~growing[:, None]
        if bool(packed.any()):
            assert self.keys is not None and self.values is not None and self.slot_positions is not None
            self._widen(heads)
            at = (slot[..., 0] - f).clamp(min=0)
            for side in (self.keys, self.values):
                side.overwrite(at, self._mapped(side.role, getattr(leaving, side.role)), packed)
            positions = leaving.positions.expand(-1, heads, -1)
            _put(self.slot_positions, at, positions[..., 0], packed)
            if self.slot_scores is not None and leaving.scores is not None:
                _put(self.slot_scores, at, leaving.scores[..., 0], packed)
        if bool(ahead.any()):
            assert self.front is not None
            self._widen(heads)
            for name, tensor in self.front.tensors().items():
                value = leaving.tensors()[name]
                value = value.expand(-1, heads, *value.shape[2:])
                _put(tensor, slot[..., 0].clamp(max=f - 1), value[:, :, 0], ahead)
        self.is_ragged = True
        self.tail.overwrite(place)
        if bool(growing.any()):
            self.tail.length += 1
            positions = self.tail.rows.positions
            positions[..., -1].masked_fill_(~growing[:, None].expand(-1, positions.shape[1]), EMPTY)

    def _widen(self, heads: int) -> None:
        """Give every head positions of its own."""
        self._before_writing()
        if self.slot_positions is not None and self.slot_positions.shape[1] != heads:
            self.slot_positions = self.slot_positions.expand(-1, heads, -1).contiguous()
        if self.front is not None and self.front.positions.shape[1] != heads:
            self.front.positions = self.front.positions.expand(-1, heads, -1).contiguous()
        self.tail.widen_positions()

    def expire(self, before: int, only_packed: bool = False) -> bool:
        """Forget rows of positions under `before`, but for the front (and the tail, if asked). Whether any went.

        Rows vanish from sight at once, and from memory when whole tiles of them have gone.
        """
        if min(self.fronts) < self.codec.num_sink_tokens and not only_packed:
            self._fill_front()
        gone = False
        tables = [] if only_packed else [self.tail.rows.positions]
        if self.has_packed and self.slot_positions is not None:
            tables.append(self.slot_positions[:, :, : self.slots])
        for table in tables:
            old = (table < before) & (table != EMPTY)
            if bool(old.any()):
                table.masked_fill_(old, EMPTY)
                gone = True
        if gone:
            self.is_ragged = self.is_ragged or not only_packed
            self._sweep()
        return gone

    def _fill_front(self) -> None:
        """Move first rows to the front before anything is packed."""
        rows = self.tail.rows
        live = (rows.positions[:, 0] != EMPTY).sum(-1).tolist()
        rows = rows.gather(rows.positions.argsort(dim=-1, stable=True))
        for b, count in enumerate(live):
            sinks = min(self.codec.num_sink_tokens - self.fronts[b], count)
            if sinks <= 0:
                continue
            part = torch.tensor([b], device=rows.keys.device)
            mine = rows.map(lambda t, part=part: t[part])  # type: ignore[misc]
            start = rows.length - count
            self._to_front(part, mine, start, self.fronts[b], sinks)
            rows.positions[b, :, start : start + sinks] = EMPTY
            self.fronts[b] += sinks
        self.is_ragged = True
        self.tail.replace(rows, self.codec.block)

    def _sweep(self) -> None:
        """Free whole tiles of packed slots that are empty, and empty rows of the tail."""
        self._before_writing()
        if self.has_packed and self.keys is not None and self.values is not None and self.slot_positions is not None:
            unit = math.lcm(2 * self.keys.half, self.codec.block)
            held = (self.slot_positions[:, :, : self.slots] != EMPTY).any(1).any(0)
            first = int(held.to(torch.int8).argmax()) if bool(held.any()) else self.slots
            cut, used = first // unit * unit, self.slots
            if cut:
                for side in (self.keys, self.values):
                    side.drop_front(cut, used)
                room = self.keys.tiles * 2 * self.keys.half
                for name, fill in (("slot_positions", EMPTY), ("slot_scores", 0.0)):
                    table = getattr(self, name)
                    if table is not None:
                        shape = (*table.shape[:2], room)
                        setattr(self, name, grown(table[:, :, cut:used], shape, fill, table.dtype, table.device))
                self.used = [max(0, u - cut) for u in self.used]
        rows = self.tail.rows
        count = int((rows.positions != EMPTY).sum(-1).max())
        if rows.length - count >= self.codec.block:
            order = rows.positions.argsort(dim=-1, stable=True)
            self.tail.replace(rows.gather(order[..., rows.length - count :]), self.codec.block)

    # ------------------------------------------------------------------ operations

    def crop(self, n: int, seen: int | None = None) -> None:
        """Forget the last `n` rows; `seen` is the number of tokens left. Packed rows stay as they are coded."""
        if seen is None or (not self.has_packed and self.front is None):
            self.tail.crop(n)
            return
        positions = self.tail.rows.positions
        start = max(0, self.tail.length - n)
        last, others = positions[..., start:], [positions[..., :start]]
        if self.front is not None:
            others.append(self.front.positions)
        if self.has_packed and self.slot_positions is not None:
            others.append(self.slot_positions[:, :, : self.slots])
        simple = n <= self.tail.length and not bool(((last < seen) & (last != EMPTY)).any())
        simple = simple and all(bool((table < seen).all()) for table in others)
        if simple:
            self.tail.crop(n)
        else:
            self._forget_from(seen)

    def _forget_from(self, seen: int) -> None:
        """Forget every row of position `seen` and later, in packed and front rows too."""
        rows = self.tail.rows
        stays = (rows.positions != EMPTY) & (rows.positions < seen)
        longest = int(stays.sum(-1).max())
        order = torch.where(stays, rows.positions, -1).argsort(dim=-1, stable=True)
        kept = rows.map(lambda t: t)
        kept.positions = torch.where(stays, rows.positions, EMPTY)
        kept = kept.gather(order[..., rows.length - longest :]) if longest else kept.map(lambda t: t[:, :, :0])
        if self.slot_positions is not None and self.has_packed:
            table = self.slot_positions[:, :, : self.slots]
            table.masked_fill_(table >= seen, EMPTY)
            held = (table != EMPTY).any(1)  # [B, slots]
            index = torch.arange(1, held.shape[1] + 1, device=held.device)
            ends = (held * index).amax(-1).tolist()
            block = self.codec.block
            before = self.used
            self.used = [-(-end // block) * block for end in ends]
            for side in (self.keys, self.values):
                if side is not None:
                    clear_codes(side, self.used, before)
        if self.front is not None:
            self.front.positions.masked_fill_(self.front.positions >= seen, EMPTY)
            self.fronts = (self.front.positions[:, 0] != EMPTY).sum(-1).tolist()
        self.tail.replace(kept, self.codec.block)
        self.is_ragged = True

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor], lists: bool = True) -> None:
        """Apply `fn` to every tensor, and (`lists`) to the numbers of each batch row."""
        self._before_writing()
        self.tail.batch_map(fn)
        self.front = None if self.front is None else self.front.map(fn)
        for side in (self.keys, self.values):
            if side is not None:
                side.batch_map(fn)
        for name in ("slot_positions", "slot_scores", "mean"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else fn(tensor))
        if not lists:
            return
        self.used = fn(torch.tensor(self.used, dtype=torch.int64)).tolist()
        self.fronts = fn(torch.tensor(self.fronts, dtype=torch.int64)).tolist()
        self.begun = fn(torch.tensor(self.begun, dtype=torch.int64)).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedStore:
        twin = PackedStore(self.make)
        for name, value in vars(self).items():
            # The codec never changes, and its matrices are the same for everyone.
            shared = name in ("make", "_codec", "_turns")
            if name != "_attended":
                setattr(twin, name, value if shared else copy.deepcopy(value, memo))
        return twin

    def due(self, new: int) -> list[int]:
        """Which of the newest `new` tokens would, one by one, have found another block packed. One batch row only."""
        c, held = self.codec, self.tail.length - new
        missing = c.num_sink_tokens - self.fronts[0]
        blocks = [max(0, (held + token - c.residual_length - missing) // c.block) for token in range(new)]
        return [token for token in range(1, new) if blocks[token] > blocks[token - 1]]

    def as_of(self, later: int) -> PackedStore:
        """A copy that packed what was due before its newest `later` tokens came."""
        twin = self._twin()
        rows = twin.tail.rows
        newest = rows.map(lambda t: t[:, :, rows.length - later :].clone())
        twin.tail.crop(later)
        twin.compress()
        twin.tail.append(newest)
        return twin

    def _twin(self) -> PackedStore:
        return copy.deepcopy(self)

    def seal(self) -> PackedStore:
        """This store with everything but its tail read-only, for copies to share."""
        from .sealed import PackedChain

        return PackedChain.of(self)

    def flat(self) -> PackedStore:
        """A store that holds all rows itself."""
        return self


def grown(
    old: torch.Tensor | None, shape: tuple[int, int, int], fill: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    new = torch.full(shape, fill, dtype=dtype, device=device)
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new


def _same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects."""
    return all(this is that for this, that in zip(these, those, strict=True))


def _put(table: torch.Tensor, at: torch.Tensor, value: torch.Tensor, where: torch.Tensor) -> None:
    """`table[b, h, at[b, h]] = value[b, h]` where `where` is True."""
    b = torch.arange(at.shape[0], device=at.device)[:, None].expand_as(at)
    h = torch.arange(at.shape[1], device=at.device)[None].expand_as(at)
    table[b[where], h[where], at[where]] = value[where].to(table.dtype)
