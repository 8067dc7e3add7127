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
from ..ops.decode_attention.cpu import native_half
from ..ops.dequantize import dequantize
from ..ops.packed import Format, Packed, codes_shape, linear_scale, log_scale, pack_codes, unpack_codes
from ..ops.quantize_pack import quantize, quantize_pack
from .dense import EMPTY, DenseSegment, Rows

if TYPE_CHECKING:
    from ..codecs.base import LayerCodec

LAST = torch.iinfo(torch.int32).max


def half_for(device: torch.device) -> int:
    """Half the tile that suits the kernels of a device."""
    return native_half() or 32 if device.type == "cpu" else 32


def tiles_for(slots: int, half: int) -> int:
    """Tiles allocated when `slots` rows are packed: 1/32 more than needed, at least one."""
    needed = -(-slots // (2 * half))
    return needed + max(1, needed // 32)


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


class Side:
    """The packed keys, or the packed values, of a layer: buffers that grow by tiles."""

    def __init__(self, fmt: Format, role: str, half: int, dim: int) -> None:
        self.fmt, self.role, self.half, self.dim = fmt, role, half, dim
        self.tiles = 0  # allocated
        self.packed: Packed | None = None
        self.base: torch.Tensor | None = None  # [B, H, 1, 1] float16, where scales are 8-bit logarithms

    @property
    def _tile_dim(self) -> int:
        return 2 if self.role == "keys" else 3

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.packed is None:
            return {}
        return {name: t for name, t in (*self.packed._asdict().items(), ("base", self.base)) if t is not None}

    def rows(self, slots: int) -> Packed:
        """The first `slots` slots as the operations take them, with linear scales."""
        assert self.packed is not None
        if self.base is None:
            return self.packed
        return self.packed._replace(scale=linear_scale(self.packed.scale[:, :, :slots], self.base))

    def _stored(self, scale: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
        return scale if base is None else log_scale(scale, base)

    def reserve(self, batch: int, heads: int, tiles: int, device: torch.device) -> None:
        """Room for `tiles` tiles; what is held stays."""
        if self.packed is not None and tiles <= self.tiles:
            return
        slots = tiles * 2 * self.half
        fmt = self.fmt
        groups = (-(-slots // fmt.group), self.dim) if fmt.axis == "channel" else (slots, self.dim // fmt.group)
        shape = codes_shape((batch, heads, slots, self.dim), fmt.bits, self.role, self.half)
        new = Packed(
            # Zeros, not garbage: what is packed later is merged into half-filled tiles.
            torch.zeros(shape, dtype=torch.uint8, device=device),
            torch.zeros(
                batch, heads, *groups, dtype=torch.float16 if fmt.scale_bits == 16 else torch.uint8, device=device
            ),
            torch.zeros(batch, heads, *groups, dtype=torch.float16, device=device) if fmt.has_zero else None,
        )
        if self.packed is not None:
            for old, into in zip(self.packed, new, strict=True):
                if old is not None and into is not None:
                    dim = self._tile_dim if old is self.packed.codes else 2
                    into.narrow(dim, 0, old.shape[dim]).copy_(old)
        elif fmt.scale_bits == 8:
            self.base = torch.zeros(batch, heads, 1, 1, dtype=torch.float16, device=device)
        self.packed, self.tiles = new, tiles

    def write(self, part: slice | torch.Tensor, slot: int, new: Packed, first_rows: bool) -> None:
        """Put freshly packed rows of the batch rows `part` at `slot`; the first tile may be half full."""
        assert self.packed is not None
        tile = 2 * self.half
        if self.base is not None:
            if first_rows:
                self.base[part] = 4 * new.scale.amax((2, 3), keepdim=True)
            new = new._replace(scale=log_scale(new.scale, self.base[part]))
        first, count = slot // tile, new.codes.shape[self._tile_dim]
        index: list[Any] = [part] + [slice(None)] * (self._tile_dim - 1)
        if slot % tile:
            self.packed.codes[(*index, first)] |= new.codes.select(self._tile_dim, 0)
            new, first, count = new._replace(codes=new.codes.narrow(self._tile_dim, 1, count - 1)), first + 1, count - 1
        if count:
            self.packed.codes[(*index, slice(first, first + count))] = new.codes
        start = slot // self.fmt.group if self.fmt.axis == "channel" else slot
        for mine, theirs in ((self.packed.scale, new.scale), (self.packed.zero, new.zero)):
            if mine is not None and theirs is not None:
                mine[part, :, start : start + theirs.shape[2]] = theirs

    def trimmed(self, slots: int) -> dict[str, torch.Tensor]:
        """The tensors that hold the first `slots` slots."""
        table = self.tensors()
        tiles = -(-slots // (2 * self.half))
        groups = -(-slots // self.fmt.group) if self.fmt.axis == "channel" else slots
        table["codes"] = table["codes"].narrow(self._tile_dim, 0, tiles)
        return {name: t[:, :, :groups] if name in ("scale", "zero") else t for name, t in table.items()}

    def restore(self, table: dict[str, torch.Tensor]) -> None:
        """The reverse of `trimmed`, into buffers that have room."""
        assert self.packed is not None
        for name, tensor in table.items():
            if name == "base":
                self.base = tensor.clone()
                continue
            into = getattr(self.packed, name)
            dim = self._tile_dim if name == "codes" else 2
            into.narrow(dim, 0, min(tensor.shape[dim], into.shape[dim])).copy_(
                tensor.narrow(dim, 0, min(tensor.shape[dim], into.shape[dim]))
            )

    def codes(self, slots: int) -> torch.Tensor:
        """Unpacked codes, uint8 `[B, H, slots, D]`."""
        assert self.packed is not None
        tiles = -(-slots // (2 * self.half))
        codes = self.packed.codes.narrow(self._tile_dim, 0, tiles)
        return unpack_codes(codes, self.fmt.bits, self.role, self.dim)[:, :, :slots]

    def set_codes(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> None:
        """Hold these rows (of a format that is per token), their scales as they are stored."""
        base = self.base
        self.packed, self.tiles, self.base = None, 0, None
        slots = codes.shape[2]
        self.reserve(codes.shape[0], codes.shape[1], tiles_for(slots, self.half), codes.device)
        after = -slots % (2 * self.half)
        whole = torch.nn.functional.pad(codes, (0, 0, 0, after))
        self.base = None
        codes = pack_codes(whole, self.fmt.bits, self.role, self.half)
        self.write(slice(None), 0, Packed(codes, scale, zero), first_rows=False)
        self.base = base

    def decoded(self, slots: int) -> torch.Tensor:
        """float32 `[B, H, slots, D]`."""
        assert self.packed is not None
        tiles = -(-slots // (2 * self.half))
        codes = self.packed.codes.narrow(self._tile_dim, 0, tiles)
        return dequantize(self.rows(slots)._replace(codes=codes), self.fmt, self.role, self.dim, slots, torch.float32)

    def overwrite(self, slot: torch.Tensor, rows: torch.Tensor, where: torch.Tensor) -> None:
        """Write exact rows `[B, H, 1, D]` into slots `[B, H]`, one for each head, where `where` `[B, H]` is True."""
        assert self.packed is not None
        codes, scale, zero = quantize(rows, self.fmt)
        scale = self._stored(scale, self.base)
        tile = 2 * self.half
        b = torch.arange(slot.shape[0], device=slot.device)[:, None].expand_as(slot)
        h = torch.arange(slot.shape[1], device=slot.device)[None].expand_as(slot)
        b, h, slot = b[where], h[where], slot[where]
        # The tile of each slot is taken out, changed and put back.
        at = (b, h, slot // tile) if self.role == "keys" else (b, h, slice(None), slot // tile)
        tiles = self.packed.codes[at]  # [n, rows, half] or [n, blocks, rows, v]
        if self.role == "keys":
            plain = unpack_codes(tiles[:, None, None], self.fmt.bits, "keys", self.dim)  # [n, 1, tile, D]
        else:
            plain = unpack_codes(tiles[:, None, :, None], self.fmt.bits, "values", self.dim)
        n = torch.arange(slot.shape[0], device=slot.device)
        plain[n, 0, slot % tile] = codes[b, h, 0]
        again = pack_codes(plain, self.fmt.bits, self.role, self.half)
        self.packed.codes[at] = again[:, 0, 0] if self.role == "keys" else again[:, 0, :, 0]
        self.packed.scale[b, h, slot] = scale[b, h, 0]
        if self.packed.zero is not None and zero is not None:
            self.packed.zero[b, h, slot] = zero[b, h, 0]

    def drop_front(self, slots: int, used: int) -> None:
        """Forget the first `slots` slots (whole tiles and groups)."""
        assert self.packed is not None
        tile = 2 * self.half
        tiles = -(-(used - slots) // tile)
        step = self.fmt.group if self.fmt.axis == "channel" else 1
        kept = Packed(
            self.packed.codes.narrow(self._tile_dim, slots // tile, tiles),
            self.packed.scale[:, :, slots // step : -(-used // step)],
            None if self.packed.zero is None else self.packed.zero[:, :, slots // step : -(-used // step)],
        )
        for held, part in zip(self.packed, kept, strict=True):
            if held is not None and part is not None:
                dim = self._tile_dim if held is self.packed.codes else 2
                length = part.shape[dim]
                held.narrow(dim, 0, length).copy_(part.clone())
                if held is self.packed.codes:
                    held.narrow(dim, length, held.shape[dim] - length).zero_()

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.packed is not None:
            codes, scale, zero = self.packed
            self.packed = Packed(fn(codes), fn(scale), None if zero is None else fn(zero))
            self.base = None if self.base is None else fn(self.base)


class PackedStore:
    """Rows of one layer in the codec's formats, exact at both ends. Lossy in the middle.

    The interface is that of `Chain`; `compress` packs what has left the exact window, and `attended` hands the parts to
    attention as they lie. Bytes: `LayerCodec.packed_bytes`, the exact rows, and 4 for the position of each row.
    """

    def __init__(self, make: Callable[[int, int], LayerCodec]) -> None:
        self._make = make  # (key size, value size) -> the codec of this layer
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
        self._positions: torch.Tensor | None = None  # [B, H|1, slots allocated]
        self._scores: torch.Tensor | None = None
        self.mean: torch.Tensor | None = None  # [B, H, D] float16, where the codec centres keys
        self.used: list[int] = []  # slots of each batch row
        self.fronts: list[int] = []  # front rows of each batch row
        self.begun: list[int] = []  # 1 where a batch row has statistics, from the first rows that it packed
        self._ragged = False  # some row of the tail may be empty, or out of order
        self._turns: dict[tuple[str, torch.device], torch.Tensor] = {}

    # ------------------------------------------------------------------ what it holds

    @property
    def slots(self) -> int:
        """Packed slots of the batch row that has most."""
        return max(self.used, default=0)

    @property
    def front_length(self) -> int:
        return 0 if self.front is None else self.front.length

    @property
    def is_ragged(self) -> bool:
        """Whether some row of the tail may be empty, or out of order."""
        return self._ragged

    @property
    def has_packed(self) -> bool:
        return self.slots > 0

    @property
    def has_holes(self) -> bool:
        """Whether some packed or front slot holds no token."""
        tables = [] if self.front is None else [self.front.positions]
        if self.has_packed and self._positions is not None:
            tables.append(self._positions[:, :, : self.slots])
        return any(bool((table == EMPTY).any()) for table in tables)

    @property
    def length(self) -> int:
        return self.front_length + self.slots + self.tail.length

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    def _tensors(self) -> list[torch.Tensor]:
        found = [t for t in (self._positions, self._scores, self.mean) if t is not None]
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
            table = self._positions if name == "positions" else self._scores
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
        if self._scores is not None:
            self._scores[..., :s].copy_(scores[..., f : f + s])
        tail = self.tail.rows.scores
        assert tail is not None
        tail.copy_(scores[..., f + s :])

    def decoded(self, which: str) -> torch.Tensor:
        """All keys or values `[B, H, N, D]` as full numbers."""
        parts = [] if self.front is None else [getattr(self.front, which)]
        tail = getattr(self.tail.rows, which)
        side = self.keys if which == "keys" else self.values
        if side is not None and self.has_packed:
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
        device = self.tail.rows.keys.device
        if turn.device != device:
            turn = self._turns.setdefault((which, device), turn.to(device))
        return turn

    def attended(self) -> tuple[Rows | None, PackedRows | None, Rows]:
        """Front, packed rows and tail, as attention takes them."""
        if not self.has_packed:
            return self.front, None, self.tail.rows
        assert self.keys is not None and self.values is not None
        packed = PackedRows(
            self.keys.rows(self.slots),
            self.values.rows(self.slots),
            self.keys.fmt,
            self.values.fmt,
            self.slots,
            self.keys.half,
            self._turn("keys"),
            key_mean=self.mean,
            value_turn=self._turn("values"),
        )
        return self.front, packed, self.tail.rows

    # ------------------------------------------------------------------ writing

    def append(self, rows: Rows) -> None:
        """New rows go to the tail, exact."""
        if rows.length > 1:
            self._ragged = True  # padding may stand between
        self._meet(rows)
        self.tail.append(rows)

    def replace(self, rows: Rows, reserve: int = 0) -> None:
        """Hold exactly `rows`, none of them packed yet."""
        self.clear()
        self._meet(rows)
        self._ragged = True
        self.tail.replace(rows, reserve)

    def _meet(self, rows: Rows) -> None:
        """Take the sizes from the first rows."""
        if self._codec is None:
            self._codec = self._make(rows.keys.shape[-1], rows.values.shape[-1])
        if not self.used:
            self.used = [0] * rows.keys.shape[0]
            self.fronts = [0] * rows.keys.shape[0]
            self.begun = [0] * rows.keys.shape[0]

    def mark(self, positions: torch.Tensor) -> None:
        """Rewrite the positions of the newest rows."""
        self._ragged = True
        self.tail.rows.positions[:, :, -positions.shape[-1] :].copy_(positions)

    def compress(self, reserve: int = 0) -> bool:
        """Pack every block that has left the exact window. Whether anything was packed.

        `reserve` is the least number of free rows that the tail is left with.
        """
        if self.tail.is_empty or self.tail.rows.keys.requires_grad:
            return False  # a training step reads the rows that it wrote
        c, rows = self.codec, self.tail.rows
        missing = [c.num_sink_tokens - have for have in self.fronts]
        if rows.length - c.residual_length - min(missing) < c.block:
            return False
        batch, n = rows.keys.shape[0], rows.length
        live, order = [n] * batch, None
        if self._ragged:
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
        self._reserve(rows, max(most, self.slots))
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
        self._ragged = min(left) < longest
        return True

    def _reserve(self, rows: Rows, slots: int) -> None:
        """Room for `slots` slots in every table of packed rows."""
        batch, heads = rows.keys.shape[:2]
        device = rows.keys.device
        if self.keys is None or self.values is None:
            half = half_for(device)
            self.keys = Side(self.codec.key_format, "keys", half, rows.keys.shape[-1])
            self.values = Side(self.codec.value_format, "values", half, rows.values.shape[-1])
        tiles = self.keys.tiles
        if slots > tiles * 2 * self.keys.half:
            tiles = tiles_for(slots, self.keys.half)
        self.keys.reserve(batch, heads, tiles, device)
        self.values.reserve(batch, heads, tiles, device)
        room = tiles * 2 * self.keys.half
        wide = rows.positions.shape[1]
        if self._positions is None or self._positions.shape[2] < room or self._positions.shape[1] < wide:
            self._positions = _grown(self._positions, (batch, wide, room), EMPTY, torch.int32, device)
        if rows.scores is not None and (self._scores is None or self._scores.shape[2] < room):
            self._scores = _grown(self._scores, (batch, heads, room), 0.0, torch.float32, device)

    def _to_front(self, part: slice | torch.Tensor, rows: Rows, start: int, have: int, count: int) -> None:
        """Move `count` first rows of some batch rows to the front, behind the `have` that are there."""
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
        assert self.keys is not None and self.values is not None and self._positions is not None
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
        self._positions[part, :, slot : slot + count] = rows.positions[:, :, start:stop]
        if self._scores is not None and rows.scores is not None:
            self._scores[part, :, slot : slot + count] = rows.scores[:, :, start:stop]

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
        moved: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        for side in (self.keys, self.values):
            ends = [] if self.front is None else [getattr(self.front, side.role)]
            exact = torch.cat([*ends, getattr(self.tail.rows, side.role)], dim=2)
            codes, scale, zero = quantize(self._mapped(side.role, exact), side.fmt)
            fresh = (codes, side._stored(scale, side.base), zero)
            assert side.packed is not None
            held = (
                side.codes(s),
                side.packed.scale[:, :, :s],
                None if side.packed.zero is None else side.packed.zero[:, :, :s],
            )
            table: list[torch.Tensor | None] = []
            for new, old in zip(fresh, held, strict=True):
                if new is None or old is None:
                    table.append(None)
                    continue
                whole = torch.cat([new[:, :, :f], old, new[:, :, f:]], dim=2)
                table.append(whole.gather(2, index[..., None].expand(-1, -1, -1, whole.shape[-1])))
            moved[side.role] = (table[0], table[1], table[2])  # type: ignore[assignment]
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
        for role, (codes, scale, zero) in moved.items():
            picked = [
                None if t is None else t.gather(2, take[:, None, :, None].expand(-1, heads, -1, t.shape[-1]))
                for t in (codes, scale, zero)
            ]
            assert picked[0] is not None and picked[1] is not None
            halves[role].set_codes(picked[0], picked[1], picked[2])
        self._reserve(kept, slots)
        assert self._positions is not None
        where = take[:, None].expand(-1, kept.positions.shape[1], -1)
        self._positions[:, :, :slots] = kept.positions.gather(2, where).masked_fill(~inside[:, None], EMPTY)
        if self._scores is not None and kept.scores is not None:
            self._scores[:, :, :slots] = kept.scores.gather(2, take[:, None].expand(-1, heads, -1))
        for b in range(batch):
            if self.fronts[b]:
                part = torch.tensor([b], device=device)
                mine = kept.map(lambda t, part=part: t[part])  # type: ignore[misc]
                self._to_front(part, mine, n - live[b], 0, self.fronts[b])
        left = [count - used - f_ for count, used, f_ in zip(live, self.used, self.fronts, strict=True)]
        longest = max(left)
        tail = kept.map(lambda t: t[:, :, n - longest :])
        gone = torch.arange(longest, device=device)[None] < longest - torch.tensor(left, device=device)[:, None]
        tail.positions = tail.positions.masked_fill(gone[:, None], EMPTY)
        self.tail.replace(tail, max(reserve, block))
        self._ragged = min(left) < longest

    def overwrite(self, slot: torch.Tensor) -> None:
        """Move the last row of each head into `slot` `[B, H|1, 1]`, and forget the last place.

        The row that has left the exact window is written to a packed slot, and the last row takes its place.
        """
        f, s = self.front_length, self.slots
        tail = self.tail.rows
        heads = tail.keys.shape[1]
        if not s and not f:
            self._ragged = True
            self.tail.overwrite(slot)
            return
        slot = slot.expand(-1, heads, -1)
        behind = slot >= f + s
        ages = tail.positions[:, :, :-1].masked_fill(tail.positions[:, :, :-1] == EMPTY, LAST)
        oldest = ages.argmin(dim=-1, keepdim=True).expand(-1, heads, -1)
        place = torch.where(behind, slot - f - s, oldest)
        leaving = tail.gather(place)
        ahead = slot[..., 0] < f
        packed = ~behind[..., 0] & ~ahead
        if bool(packed.any()):
            assert self.keys is not None and self.values is not None and self._positions is not None
            self._widen(heads)
            at = (slot[..., 0] - f).clamp(min=0)
            for side in (self.keys, self.values):
                side.overwrite(at, self._mapped(side.role, getattr(leaving, side.role)), packed)
            positions = leaving.positions.expand(-1, heads, -1)
            _put(self._positions, at, positions[..., 0], packed)
            if self._scores is not None and leaving.scores is not None:
                _put(self._scores, at, leaving.scores[..., 0], packed)
        if bool(ahead.any()):
            assert self.front is not None
            self._widen(heads)
            for name, tensor in self.front.tensors().items():
                value = leaving.tensors()[name]
                value = value.expand(-1, heads, *value.shape[2:])
                _put(tensor, slot[..., 0].clamp(max=f - 1), value[:, :, 0], ahead)
        self._ragged = True
        self.tail.overwrite(place)

    def _widen(self, heads: int) -> None:
        """Give every head positions of its own."""
        if self._positions is not None and self._positions.shape[1] != heads:
            self._positions = self._positions.expand(-1, heads, -1).contiguous()
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
        if self.has_packed and self._positions is not None:
            tables.append(self._positions[:, :, : self.slots])
        for table in tables:
            old = (table < before) & (table != EMPTY)
            if bool(old.any()):
                table.masked_fill_(old, EMPTY)
                gone = True
        if gone:
            self._ragged = self._ragged or not only_packed
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
        self._ragged = True
        self.tail.replace(rows, self.codec.block)

    def _sweep(self) -> None:
        """Free whole tiles of packed slots that are empty, and empty rows of the tail."""
        if self.has_packed and self.keys is not None and self.values is not None and self._positions is not None:
            unit = math.lcm(2 * self.keys.half, self.codec.block)
            held = (self._positions[:, :, : self.slots] != EMPTY).any(1).any(0)
            first = int(held.to(torch.int8).argmax()) if bool(held.any()) else self.slots
            cut, used = first // unit * unit, self.slots
            if cut:
                for side in (self.keys, self.values):
                    side.drop_front(cut, used)
                for table, fill in ((self._positions, EMPTY), (self._scores, 0.0)):
                    if table is not None:
                        table[:, :, : used - cut] = table[:, :, cut:used].clone()
                        table[:, :, used - cut :] = fill
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
        if self.has_packed and self._positions is not None:
            others.append(self._positions[:, :, : self.slots])
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
        if self._positions is not None and self.has_packed:
            table = self._positions[:, :, : self.slots]
            table.masked_fill_(table >= seen, EMPTY)
            held = (table != EMPTY).any(1)  # [B, slots]
            index = torch.arange(1, held.shape[1] + 1, device=held.device)
            ends = (held * index).amax(-1).tolist()
            block = self.codec.block
            before = self.used
            self.used = [-(-end // block) * block for end in ends]
            for side in (self.keys, self.values):
                if side is not None:
                    _clear_codes(side, self.used, before)
        if self.front is not None:
            self.front.positions.masked_fill_(self.front.positions >= seen, EMPTY)
            self.fronts = (self.front.positions[:, 0] != EMPTY).sum(-1).tolist()
        self.tail.replace(kept, self.codec.block)
        self._ragged = True

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tail.batch_map(fn)
        self.front = None if self.front is None else self.front.map(fn)
        for side in (self.keys, self.values):
            if side is not None:
                side.batch_map(fn)
        for name in ("_positions", "_scores", "mean"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else fn(tensor))
        self.used = fn(torch.tensor(self.used, dtype=torch.int64)).tolist()
        self.fronts = fn(torch.tensor(self.fronts, dtype=torch.int64)).tolist()
        self.begun = fn(torch.tensor(self.begun, dtype=torch.int64)).tolist()

    # ------------------------------------------------------------------ files

    def state(self) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
        """JSON-able state and tensors, without slack. The state is None while nothing is packed."""
        parts = dict(self.tail.rows.tensors())
        if not self.has_packed and self.front is None:
            return None, parts
        half = None
        if self.has_packed and self.keys is not None and self.values is not None and self._positions is not None:
            half = self.keys.half
            parts["packed.positions"] = self._positions[:, :, : self.slots]
            if self._scores is not None:
                parts["packed.scores"] = self._scores[:, :, : self.slots]
            if self.mean is not None:
                parts["packed.mean"] = self.mean
            for side in (self.keys, self.values):
                parts |= {f"packed.{side.role}.{name}": t for name, t in side.trimmed(self.slots).items()}
        if self.front is not None:
            parts |= {f"packed.front.{name}": tensor for name, tensor in self.front.tensors().items()}
        begun = self.begun if self.has_packed else [0] * len(self.begun)  # statistics are kept with the rows
        numbers = {"used": self.used, "fronts": self.fronts, "begun": begun}
        return {**numbers, "ragged": self._ragged, "half": half}, parts

    def check_state(self, state: Any, parts: dict[str, torch.Tensor], tail: Rows, seen: int) -> None:
        """Raise `ValueError` unless these make a store of this codec. Changes nothing."""
        if state is None:
            if parts:
                raise ValueError("packed rows without their description")
            return
        batch, heads, _, key_dim = tail.keys.shape
        value_dim = tail.values.shape[-1]
        codec = self._make(key_dim, value_dim)
        used, fronts, begun, half = state["used"], state["fronts"], state["begun"], state["half"]
        for name, counts, most in (
            ("used", used, seen + codec.block),
            ("fronts", fronts, codec.num_sink_tokens),
            ("begun", begun, 1),
        ):
            numbers = isinstance(counts, list) and all(type(n) is int and 0 <= n <= most for n in counts)
            if not numbers or len(counts) != batch:
                raise ValueError(f"{name} is {counts!r}")
        slots = max(used)
        if slots % codec.block or not isinstance(state["ragged"], bool):
            raise ValueError("packed rows that end within a block")
        expected: dict[str, tuple[tuple[int, ...] | None, torch.dtype | None]] = {}
        if slots:
            if half not in (16, 32):
                raise ValueError(f"tiles of unknown size {half!r}")
            expected["packed.positions"] = (None, torch.int32)
            if tail.scores is not None or "packed.scores" in parts:
                expected["packed.scores"] = ((batch, heads, slots), torch.float32)
            if codec.centre_keys:
                expected["packed.mean"] = ((batch, heads, key_dim), torch.float16)
            for role, fmt, dim in (("keys", codec.key_format, key_dim), ("values", codec.value_format, value_dim)):
                whole = -(-slots // (2 * half)) * 2 * half
                groups = (-(-slots // fmt.group), dim) if fmt.axis == "channel" else (slots, dim // fmt.group)
                expected[f"packed.{role}.codes"] = (
                    codes_shape((batch, heads, whole, dim), fmt.bits, role, half),
                    torch.uint8,
                )
                kind = torch.float16 if fmt.scale_bits == 16 else torch.uint8
                expected[f"packed.{role}.scale"] = ((batch, heads, *groups), kind)
                if fmt.has_zero:
                    expected[f"packed.{role}.zero"] = ((batch, heads, *groups), torch.float16)
                if fmt.scale_bits == 8:
                    expected[f"packed.{role}.base"] = ((batch, heads, 1, 1), torch.float16)
        if any(name.startswith("packed.front.") for name in parts):
            for name, like in tail.tensors().items():
                expected[f"packed.front.{name}"] = (None, like.dtype)
        if set(expected) != set(parts):
            raise ValueError(f"packed tensors {sorted(parts)} where {sorted(expected)} belong")
        for name, (shape, dtype) in expected.items():
            tensor = parts[name]
            if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != tuple(shape)):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}")
            if name.startswith("packed.front.") and tensor.shape[:1] + tensor.shape[2:3] != (
                batch,
                codec.num_sink_tokens,
            ):
                raise ValueError(f"{name} is of shape {tuple(tensor.shape)}")
            if (
                name.startswith("packed.front.")
                and tensor.ndim == 4
                and tensor.shape[3] != getattr(tail, name[13:]).shape[3]
            ):
                raise ValueError(f"{name} is of shape {tuple(tensor.shape)}")
            if name.endswith("positions"):
                if tensor.ndim != 3 or tensor.shape[1] not in (1, heads):
                    raise ValueError(f"{name} is of shape {tuple(tensor.shape)}")
                if name == "packed.positions" and (tensor.shape[0], tensor.shape[2]) != (batch, slots):
                    raise ValueError(f"{name} is of shape {tuple(tensor.shape)}")
                if tensor.numel() and (int(tensor.max()) >= seen or int(tensor.min()) < EMPTY):
                    raise ValueError("positions beyond the tokens seen")

    def load_state(self, state: dict[str, Any], parts: dict[str, torch.Tensor], tail: Rows) -> None:
        """The reverse of `state`, on checked parts."""
        self.clear()
        self._meet(tail)
        self.used, self.fronts, self.begun = list(state["used"]), list(state["fronts"]), list(state["begun"])
        self._ragged = state["ragged"]
        front = {name[13:]: t.clone() for name, t in parts.items() if name.startswith("packed.front.")}
        self.front = Rows(**front) if front else None
        self.tail.replace(tail, self.codec.block)
        if not self.has_packed:
            return
        self.mean = parts.get("packed.mean")
        self._reserve(tail, self.slots)
        assert self.keys is not None and self.values is not None and self._positions is not None
        positions = parts["packed.positions"]
        self._positions = _grown(
            positions, (*positions.shape[:2], self._positions.shape[2]), EMPTY, torch.int32, positions.device
        )
        if self._scores is not None and "packed.scores" in parts:
            self._scores[:, :, : self.slots] = parts["packed.scores"]
        for side in (self.keys, self.values):
            mine = {name.rpartition(".")[2]: t for name, t in parts.items() if name.startswith(f"packed.{side.role}.")}
            if state["half"] != side.half:
                codes = unpack_codes(mine["codes"], side.fmt.bits, side.role, side.dim)
                codes = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[2] % (2 * side.half)))
                mine["codes"] = pack_codes(codes, side.fmt.bits, side.role, side.half)
            side.restore(mine)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedStore:
        twin = PackedStore(self._make)
        for name, value in vars(self).items():
            # The codec never changes, and its matrices are the same for everyone.
            shared = name in ("_make", "_codec", "_turns")
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
        twin = copy.deepcopy(self)
        rows = twin.tail.rows
        newest = rows.map(lambda t: t[:, :, rows.length - later :].clone())
        twin.tail.crop(later)
        twin.compress()
        twin.tail.append(newest)
        return twin

    def seal(self) -> None:
        raise ValueError("rows of a codec cannot be made read-only; seal a cache without a codec")


def _grown(
    old: torch.Tensor | None, shape: tuple[int, int, int], fill: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    new = torch.full(shape, fill, dtype=dtype, device=device)
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new


def _put(table: torch.Tensor, at: torch.Tensor, value: torch.Tensor, where: torch.Tensor) -> None:
    """`table[b, h, at[b, h]] = value[b, h]` where `where` is True."""
    b = torch.arange(at.shape[0], device=at.device)[:, None].expand_as(at)
    h = torch.arange(at.shape[1], device=at.device)[None].expand_as(at)
    table[b[where], h[where], at[where]] = value[where].to(table.dtype)


def _clear_codes(side: Side, used: list[int], before: list[int]) -> None:
    """Zero the codes behind the slots in use: later blocks are merged into half-filled tiles."""
    assert side.packed is not None
    tile = 2 * side.half
    for b, (now, then) in enumerate(zip(used, before, strict=True)):
        if now >= then:
            continue
        first = now // tile
        dim = side._tile_dim - 1
        codes = side.packed.codes[b]
        if now % tile:
            index = torch.arange(tile, device=codes.device) < now % tile
            if side.role == "keys":
                plain = unpack_codes(codes[None, :, first : first + 1], side.fmt.bits, "keys", side.dim)
                plain = plain * index[:, None]
                codes[:, first : first + 1] = pack_codes(plain, side.fmt.bits, "keys", side.half)[0]
            else:
                plain = unpack_codes(codes[None, :, :, first : first + 1], side.fmt.bits, "values", side.dim)
                plain = plain * index[:, None]
                codes[:, :, first : first + 1] = pack_codes(plain, side.fmt.bits, "values", side.half)[0]
            first += 1
        codes.narrow(dim, first, codes.shape[dim] - first).zero_()
