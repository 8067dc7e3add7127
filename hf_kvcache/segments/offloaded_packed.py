"""OffloadedPackedStore: packed rows beyond the compute device; exact rows, positions and scores stay on it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..offload.attend import on_cpu
from ..offload.columns import ALIGN, Column, by_page, pack, views
from ..offload.disk import READ_BYTES, DiskTier, PageFile, Records
from ..offload.transfer import Offloader, Slot
from ..ops.attention import Block, Extras, merge
from ..ops.decode_attention import PackedRows, decode_attention
from ..ops.packed import Format, Packed, codes_shape, linear_scale, scales_shape
from .dense import Rows
from .packed import PackedStore
from .side import Side, half_for

if TYPE_CHECKING:
    from ..codecs.base import LayerCodec

CPU = torch.device("cpu")


class HostSide(Side):
    """A `Side` whose buffers lie in host memory, and whose first `gone` slots may lie in files."""

    def __init__(self, fmt: Format, role: str, half: int, dim: int, unit: int, pin: bool) -> None:
        super().__init__(fmt, role, half, dim)
        self.unit = unit  # slots of one page
        self.pin = pin
        self.gone = 0
        self.files: list[tuple[Records, tuple[int, ...] | None]] = []  # and the stored row of each batch row
        self.columns: list[Column] = []

    @property
    def _gone_tiles(self) -> int:
        return self.gone // (2 * self.half)

    def dim_of(self, name: str) -> int:
        """The dimension that slots run along."""
        return self.tile_dim if name == "codes" else 2

    def per_unit(self, name: str) -> int:
        """Entries of that dimension in one page."""
        if name == "codes":
            return self.unit // (2 * self.half)
        return self.unit // self.fmt.group if self.fmt.axis == "channel" else self.unit

    def reserve(self, batch: int, heads: int, tiles: int, device: torch.device) -> None:
        gone, had = self._gone_tiles, self.packed
        self.tiles -= gone
        with torch.inference_mode(False):
            super().reserve(batch, heads, tiles - gone, CPU)
            if self.pin and self.packed is not None and self.packed is not had:
                self.packed = Packed(*(None if t is None else t.pin_memory() for t in self.packed))  # type: ignore[arg-type]
        self.tiles += gone

    def write(self, part: slice | torch.Tensor, slot: int, new: Packed, first_rows: bool) -> None:
        part = part if isinstance(part, slice) else part.to(CPU)
        new = Packed(*(None if t is None else t.to(CPU) for t in new))  # type: ignore[arg-type]
        super().write(part, slot - self.gone, new, first_rows)

    # Operations on all rows at once are rare, and find all of them in memory.

    def trimmed(self, slots: int) -> dict[str, torch.Tensor]:
        self.bring_back()
        return super().trimmed(slots)

    def restore(self, table: dict[str, torch.Tensor]) -> None:
        super().restore({name: tensor.to(CPU) for name, tensor in table.items()})

    def joined(self, exact: torch.Tensor, front: int, slots: int) -> Packed:
        self.bring_back()
        return super().joined(exact.to(CPU), front, slots)

    def take(self, rows: Packed, index: torch.Tensor) -> None:
        super().take(rows, index.to(CPU))

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.packed is not None and self.files:
            index = fn(torch.arange(self.packed.codes.shape[0])).tolist()
            self.files = [
                (records, tuple(index if rows is None else (rows[i] for i in index))) for records, rows in self.files
            ]
        super().batch_map(fn)

    # Files.

    def _table(self) -> dict[str, torch.Tensor]:
        assert self.packed is not None
        return {name: t for name, t in self.packed._asdict().items() if t is not None}

    def written(self, file: PageFile, units: int) -> Records:
        """The first `units` pages of those in memory, in a file. Changes nothing here. Raises `OSError`."""
        tensors = {
            name: t.narrow(self.dim_of(name), 0, units * self.per_unit(name)) for name, t in self._table().items()
        }
        columns = [Column.of(name, t, self.dim_of(name), self.per_unit(name)) for name, t in tensors.items()]
        if self.columns and columns != self.columns:
            self.bring_back()  # of another batch size
            return self.written(file, units + self.gone // self.unit)
        self.columns = columns
        return Records.write(file, pack(tensors, columns))

    def forget(self, records: Records) -> None:
        """Free the memory of pages that are in a file now."""
        units = len(records.sums)
        parts = {}
        with torch.inference_mode(False):
            for name, t in self._table().items():
                cut = units * self.per_unit(name)
                new = t.narrow(self.dim_of(name), cut, t.shape[self.dim_of(name)] - cut).clone()
                parts[name] = new.pin_memory() if self.pin else new
        self.packed = Packed(parts["codes"], parts["scale"], parts.get("zero"))
        self.files.append((records, None))
        self.gone += units * self.unit

    def read(self, records: Records, rows: tuple[int, ...] | None, start: int, stop: int) -> Iterator[Any]:
        """Pages of a file: `(first page, {name: [pages, ...]})`."""
        for first, piece in records.read(start, stop, self.pin):
            table = views(piece, self.columns)
            yield first, table if rows is None else {name: t[:, list(rows)] for name, t in table.items()}

    def bring_back(self) -> None:
        """Read everything into memory again."""
        if not self.files:
            return
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in self._table()}
        for records, rows in self.files:
            for _, table in self.read(records, rows, 0, len(records.sums)):
                for name, t in table.items():
                    parts[name].append(
                        t.movedim(0, self.dim_of(name)).flatten(self.dim_of(name), self.dim_of(name) + 1)
                    )
        whole = {name: torch.cat([*parts[name], t], dim=self.dim_of(name)) for name, t in self._table().items()}
        self.packed = Packed(whole["codes"], whole["scale"], whole.get("zero"))
        self.files, self.gone, self.columns = [], 0, []

    @property
    def disk_bytes(self) -> int:
        return sum(records.nbytes for records, _ in self.files)

    @property
    def host_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors().values())

    # Staging.

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes of the tensors with all slots."""
        assert self.packed is not None
        batch, heads = self.packed.scale.shape[:2]
        slots = self.tiles * 2 * self.half
        groups = (batch, heads, *scales_shape(slots, self.dim, self.fmt))
        found = {
            "codes": (codes_shape((batch, heads, slots, self.dim), self.fmt.bits, self.role, self.half), torch.uint8),
            "scale": (groups, self.packed.scale.dtype),
        }
        return found | ({} if self.packed.zero is None else {"zero": (groups, torch.float16)})

    def stage(self, into: dict[str, torch.Tensor]) -> None:
        """Copy all slots into tensors of `shapes`."""
        for name, t in self._table().items():
            dim = self.dim_of(name)
            start = self.gone // self.unit * self.per_unit(name)
            into[name].narrow(dim, start, t.shape[dim]).copy_(t, non_blocking=True)
        done = 0
        for records, rows in self.files:
            for first, table in self.read(records, rows, 0, len(records.sums)):
                for name, t in table.items():
                    dim, count = self.dim_of(name), t.shape[0] * self.per_unit(name)
                    target = into[name].narrow(dim, (done + first) * self.per_unit(name), count)
                    by_page(target, dim, self.per_unit(name)).copy_(t, non_blocking=True)
            done += len(records.sums)

    def as_staged(self, tensors: dict[str, torch.Tensor]) -> Side:
        """A side that is read from these."""
        side = Side(self.fmt, self.role, self.half, self.dim)
        side.packed, side.tiles = Packed(tensors["codes"], tensors["scale"], tensors.get("zero")), self.tiles
        side.base = None if self.base is None else self.base.to(tensors["codes"].device)
        return side

    def linear(self, table: dict[str, torch.Tensor], slots: int) -> Packed:
        """Packed rows as operations take them, from tensors of some slots on the CPU."""
        scale = table["scale"] if self.base is None else linear_scale(table["scale"][:, :, :slots], self.base)
        return Packed(table["codes"], scale, table.get("zero"))

    def piece(self, file: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Pages `start:stop` of a file, as tensors."""
        found: dict[str, list[torch.Tensor]] = {}
        for _, table in self.read(*self.files[file], start, stop):
            for name, t in table.items():
                dim = self.dim_of(name)
                found.setdefault(name, []).append(t.movedim(0, dim).flatten(dim, dim + 1).contiguous())
        return {name: torch.cat(parts, dim=self.dim_of(name)) for name, parts in found.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostSide:
        twin = copy.copy(self)  # what is in files never changes
        twin.files = list(self.files)
        for name in ("packed", "base"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin


class OffloadedPackedStore(PackedStore):
    """A `PackedStore` whose codes, scales and zeros lie in host memory, beyond their share of it in files.

    Pages move as they are packed. Fetched, results equal those of a `PackedStore` bit for bit.
    """

    def __init__(self, make: Callable[[int, int], LayerCodec], offloader: Offloader) -> None:
        self.offloader = offloader
        self.away_version = self.version = 0
        self._file: PageFile | None = None
        super().__init__(make)
        offloader.register(self)

    def clear(self) -> None:
        super().clear()
        self._file = None
        self._changed()
        self.offloader.restart()

    def _changed(self) -> None:
        self.version += 1
        self.away_version += 1

    def _new_side(self, role: str, dim: int, device: torch.device) -> Side:
        fmt = self.codec.key_format if role == "keys" else self.codec.value_format
        computes = self.offloader.config.attend != "fetch" and device.type == "cpu"
        computes = computes or self.offloader.attend_mode(device, self.tail.rows.keys.dtype) == "compute"
        half = half_for(CPU if computes else device)
        unit = math.lcm(2 * half, self.codec.block)
        return HostSide(fmt, role, half, dim, unit, self.offloader.pinned)

    @property
    def host_sides(self) -> list[HostSide]:
        return [side for side in (self.keys, self.values) if isinstance(side, HostSide)]

    @property
    def is_away(self) -> bool:
        return self.has_packed

    @property
    def device(self) -> torch.device:
        return self.tail.device

    def tier_bytes(self) -> dict[str, int]:
        host = sum(side.host_bytes for side in self.host_sides)
        disk = sum(side.disk_bytes for side in self.host_sides)
        return {"device": self.nbytes - host - disk, "host": host, "disk": disk}

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(side.disk_bytes for side in self.host_sides)

    # ------------------------------------------------------------------ reading

    staged = True

    def _sides(self) -> tuple[Side, Side]:
        slot = self.offloader.fetch(self, self.device)
        tables = self._views(slot)
        keys, values = (side.as_staged(table) for side, table in zip(self.host_sides, tables, strict=True))
        return keys, values

    @property
    def staged_need(self) -> int:
        return 0 if self.keys is None else self.keys.tiles

    def staged_room(self, least: int) -> int:
        return self.staged_need

    def staged_bytes(self, room: int) -> int:
        sizes = [math.prod(s) * d.itemsize for side in self.host_sides for s, d in side.shapes().values()]
        return sum(-(-size // _STEP) * _STEP for size in sizes)

    def _views(self, slot: Slot) -> list[dict[str, torch.Tensor]]:
        assert slot.buffer is not None
        tables, start = [], 0
        for side in self.host_sides:
            table = {}
            for name, (shape, dtype) in side.shapes().items():
                size = math.prod(shape) * dtype.itemsize
                table[name] = slot.buffer[start : start + size].view(dtype).view(shape)
                start += -(-size // _STEP) * _STEP
            tables.append(table)
        return tables

    def stage_away(self, slot: Slot) -> None:
        for side, table in zip(self.host_sides, self._views(slot), strict=True):
            side.stage(table)
            self.offloader.traffic.from_disk += side.disk_bytes
            self.offloader.traffic.to_device += sum(t.numel() * t.element_size() for t in table.values())

    def stage_resident(self, slot: Slot) -> None:
        """Exact rows stay where they are."""

    def computes(self, query: torch.Tensor) -> bool:
        """Whether packed rows are attended to on the CPU."""
        return self.has_packed and self.offloader.attend_mode(query.device, query.dtype) == "compute"

    def where_they_lie(
        self,
        query: torch.Tensor,
        front: tuple[torch.Tensor, torch.Tensor] | None,
        tail: tuple[torch.Tensor, torch.Tensor],
        extras: Extras,
        visible: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> Block:
        """A short step: packed rows on the CPU, exact ones on their device, merged. No key or value travels."""
        if self.offloader.nbytes:
            self.offloader.release()  # a long step's
        alone, first, slots = extras._replace(sinks=None), self.front_length, self.slots
        sees, adds = (_without(mask, first, first + slots) for mask in (visible, bias))
        exact = decode_attention(query, front, None, tail, alone, sees, adds, need_lse=True)
        far = (None if mask is None else mask[..., first : first + slots] for mask in (visible, bias))
        asked, seen, added = on_cpu(query, *far)
        assert asked is not None
        none = [t[:, :, :0].to(CPU) for t in tail]
        blocks, start = [exact], 0
        for packed in self._pieces():
            stop = start + packed.length
            sees, adds = (None if mask is None else mask[..., start:stop] for mask in (seen, added))
            block = decode_attention(asked, None, packed, (none[0], none[1]), alone, sees, adds, need_lse=True)
            assert block.lse is not None
            blocks.append(Block(block.output.to(query.device), block.lse.to(query.device), None))
            start = stop
        return Block(merge(blocks, extras.sinks), None, None)

    def _pieces(self) -> Iterator[PackedRows]:
        """Packed rows in order on the CPU; those in files are read a piece at a time."""
        keys, values = self.host_sides

        def rows(tables: list[dict[str, torch.Tensor]], slots: int) -> PackedRows:
            return PackedRows(
                keys.linear(tables[0], slots),
                values.linear(tables[1], slots),
                keys.fmt,
                values.fmt,
                slots,
                keys.half,
                self.codec.key_turn,
                key_mean=None if self.mean is None else self.mean.to(CPU),
                value_turn=self.codec.value_turn,
            )

        for i, (mine, theirs) in enumerate(zip(keys.files, values.files, strict=True)):
            count = len(mine[0].sums)
            step = max(1, READ_BYTES // max(mine[0].size, theirs[0].size))
            for start in range(0, count, step):
                stop = min(start + step, count)
                self.offloader.traffic.from_disk += (stop - start) * (mine[0].size + theirs[0].size)
                yield rows([side.piece(i, start, stop) for side in (keys, values)], (stop - start) * keys.unit)
        if self.slots > keys.gone:
            yield rows([side._table() for side in (keys, values)], self.slots - keys.gone)

    # ------------------------------------------------------------------ writing

    def compress(self, reserve: int = 0) -> bool:
        if not super().compress(reserve):
            return False
        self._changed()
        self._spill()
        return True

    def _spill(self) -> None:
        """Write the oldest packed rows to disk, while this layer holds more than its share of host memory."""
        share = self.offloader.host_share
        sides = self.host_sides
        if share is None or not sides or sum(side.host_bytes for side in sides) <= share:
            return
        unit, gone = sides[0].unit, sides[0].gone
        whole = min(self.used) // unit - gone // unit  # every batch row has written these to the end
        size = sum(side.host_bytes for side in sides) / max(1, sides[0].tiles - sides[0]._gone_tiles)
        size *= unit // (2 * sides[0].half)
        units = min(whole, math.ceil((sum(side.host_bytes for side in sides) - share // 2) / size))
        if units <= 0:
            return

        def write(disk: DiskTier) -> list[Records]:
            self._file = disk.file_for(self._file)
            return [side.written(self._file, units) for side in sides]

        written = self.offloader.try_write(write)
        if written is None:
            return
        for side, records in zip(sides, written, strict=True):
            side.forget(records)
            self.offloader.traffic.to_disk += records.nbytes
        self._changed()

    def select(self, rows: Rows, index: torch.Tensor, filled: torch.Tensor | None, reserve: int) -> None:
        super().select(rows, index, filled, reserve)
        self._changed()

    def overwrite(self, slot: torch.Tensor) -> None:
        raise NotImplementedError("rows that have left the device are not overwritten")

    def _forget_from(self, seen: int) -> None:
        for side in self.host_sides:
            side.bring_back()
        super()._forget_from(seen)
        self._changed()

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor], lists: bool = True) -> None:
        super().batch_map(fn, lists)
        self._changed()

    def _twin(self) -> PackedStore:
        return copy.deepcopy(self, {id(self.offloader): self.offloader})  # it shares the staging buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedPackedStore:
        twin = OffloadedPackedStore(self.make, copy.deepcopy(self.offloader, memo))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if name not in ("offloader", "_file"):
                shared = name in ("make", "_codec", "_turns")
                setattr(twin, name, value if shared else copy.deepcopy(value, memo))
        return twin


def _without(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    """A mask without its columns `start:stop`."""
    return None if mask is None else torch.cat([mask[..., :start], mask[..., stop:]], dim=-1)


_STEP = 4 * ALIGN
