"""Full-precision pages of one layer, in host memory or in a file: runs of consecutive pages that never change.

Runs are shared by copies of a cache. A batch operation (beams, `batch_select_indices`) changes which stored row of a
run belongs to which row of the batch, and moves no data.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .columns import Column, pack, record_bytes, views
from .disk import PageFile, Records

Pair = tuple[torch.Tensor, torch.Tensor]  # keys, values


class HostPages:
    """A run of pages in host memory: keys `[B, H, N, D]`, values `[B, H, N, Dv]` with room for more at the end."""

    tier = "host"

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, page: int, pages: int = 0) -> None:
        self.keys, self.values, self.page, self.pages = keys, values, page, pages
        self.rows: tuple[int, ...] | None = None  # stored row of each batch row; None: the same
        self.is_open = True  # nobody else holds it, so pages may be added
        self.ready: torch.cuda.Event | None = None  # when copies into it are done

    @staticmethod
    def empty(like: Pair, page: int, room: int, pin: bool) -> HostPages:
        # Ordinary tensors, whatever mode we are called in: they are written again later.
        with torch.inference_mode(False):
            keys, values = (
                torch.empty(*t.shape[:2], room * page, t.shape[3], dtype=t.dtype, pin_memory=pin) for t in like
            )
        return HostPages(keys, values, page)

    @property
    def room(self) -> int:
        """Pages that can still be added."""
        return self.keys.shape[2] // self.page - self.pages if self.is_open and self.rows is None else 0

    @property
    def nbytes(self) -> int:
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy whole pages behind those held; on a GPU without waiting."""
        start, stop = self.pages * self.page, self.pages * self.page + keys.shape[2]
        self.keys[:, :, start:stop].copy_(keys, non_blocking=True)
        self.values[:, :, start:stop].copy_(values, non_blocking=True)
        if keys.is_cuda:
            self.ready = torch.cuda.current_stream(keys.device).record_event()
        self.pages = stop // self.page

    def wait(self) -> None:
        """Until the CPU can read what was added."""
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None

    def copy_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all pages to `[B, H, pages * page, D]`, on the current stream."""
        if self.ready is not None:
            self.ready.wait(torch.cuda.current_stream(keys.device))
        for mine, into in ((self.keys, keys), (self.values, values)):
            held = mine[:, :, : self.pages * self.page]
            if self.rows is None:
                into.copy_(held, non_blocking=True)
                continue
            for row, source in enumerate(self.rows):
                into[row].copy_(held[source], non_blocking=True)

    def pieces(self) -> Iterator[Pair]:
        """All pages as CPU tensors `[B, H, N, D]`."""
        self.wait()
        n = self.pages * self.page
        keys, values = self.keys[:, :, :n], self.values[:, :, :n]
        if self.rows is not None:
            index = torch.tensor(self.rows)
            keys, values = keys[index], values[index]
        yield keys, values

    def pick(self, row: torch.Tensor, head: torch.Tensor, page: torch.Tensor) -> Pair:
        """Single pages of single heads: `[n, page, D]` of batch rows, heads and pages `[n]`."""
        self.wait()
        if self.rows is not None:
            row = torch.tensor(self.rows)[row]
        keys, values = (t.unflatten(2, (t.shape[2] // self.page, self.page)) for t in (self.keys, self.values))
        return keys[row, head, page], values[row, head, page]

    def part(self, start: int, stop: int) -> HostPages:
        """Pages `start:stop` on the same buffers."""
        self.is_open = False
        span = slice(start * self.page, None)
        twin = HostPages(self.keys[:, :, span], self.values[:, :, span], self.page, stop - start)
        twin.rows, twin.is_open, twin.ready = self.rows, False, self.ready
        return twin

    def mapped(self, index: tuple[int, ...]) -> HostPages:
        """The run after a batch operation that takes the rows `index`."""
        rows = index if self.rows is None else tuple(self.rows[i] for i in index)
        twin = self.part(0, self.pages)
        twin.rows = rows
        used = sorted(set(rows))
        if 2 * len(used) <= self.keys.shape[0]:  # most stored rows belong to nobody any more
            self.wait()
            pick = torch.tensor(used, dtype=torch.int64)
            with torch.inference_mode(False):
                pinned = self.keys.is_pinned()
                twin = HostPages.empty(
                    (self.keys[pick, :, :0], self.values[pick, :, :0]), self.page, self.pages, pinned
                )
                n = self.pages * self.page
                twin.add(self.keys[pick, :, :n], self.values[pick, :, :n])
            twin.rows, twin.is_open = tuple(used.index(row) for row in rows), False
        if twin.rows == tuple(range(twin.keys.shape[0])):
            twin.rows = None
        return twin

    def to_disk(self, file: PageFile) -> DiskPages:
        """The same pages in a file. Raises `OSError`, with nothing changed."""
        self.wait()
        n = self.pages * self.page
        tensors = {"keys": self.keys[:, :, :n], "values": self.values[:, :, :n]}
        columns = [Column.of(name, tensor, 2, self.page) for name, tensor in tensors.items()]
        return DiskPages(Records.write(file, pack(tensors, columns)), columns, self.rows)


class DiskPages:
    """A run of pages in a file, one record for each."""

    tier = "disk"
    room = 0

    def __init__(self, records: Records, columns: list[Column], rows: tuple[int, ...] | None) -> None:
        self.records, self.columns, self.rows = records, columns, rows

    @property
    def pages(self) -> int:
        return len(self.records.sums)

    @property
    def page(self) -> int:
        return self.columns[0].shape[2]

    @property
    def nbytes(self) -> int:
        assert self.records.size == record_bytes(self.columns)
        return self.records.nbytes

    def _read(self, start: int, stop: int, pin: bool = False) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for first, piece in self.records.read(start, stop, pin):
            yield first, views(piece, self.columns)

    def copy_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for first, table in self._read(0, self.pages, pin=keys.is_cuda):
            count = table["keys"].shape[0]
            span = slice(first * self.page, (first + count) * self.page)
            for name, into in (("keys", keys), ("values", values)):
                target = into[:, :, span].unflatten(2, (count, self.page)).movedim(2, 0)  # [P, B, H, page, D]
                source = table[name] if self.rows is None else table[name][:, list(self.rows)]
                target.copy_(source, non_blocking=True)

    def pieces(self) -> Iterator[Pair]:
        for _, table in self._read(0, self.pages):
            pair = []
            for name in ("keys", "values"):
                source = table[name] if self.rows is None else table[name][:, list(self.rows)]
                pair.append(source.movedim(0, 2).flatten(2, 3))
            yield pair[0], pair[1]

    def pick(self, row: torch.Tensor, head: torch.Tensor, page: torch.Tensor) -> Pair:
        if self.rows is not None:
            row = torch.tensor(self.rows)[row]
        out: list[torch.Tensor] = []
        for column in self.columns:
            out.append(torch.empty(row.numel(), *column.shape[2:], dtype=column.dtype))
        wanted = page.unique().tolist()
        start = 0
        while start < len(wanted):  # runs of neighbouring pages are read at once
            stop = start + 1
            while stop < len(wanted) and wanted[stop] == wanted[stop - 1] + 1:
                stop += 1
            for first, table in self._read(wanted[start], wanted[stop - 1] + 1):
                count = table["keys"].shape[0]
                here = ((page >= first) & (page < first + count)).nonzero().flatten()
                for into, column in zip(out, self.columns, strict=True):
                    into[here] = table[column.name][page[here] - first, row[here], head[here]]
            start = stop
        return out[0], out[1]

    def part(self, start: int, stop: int) -> DiskPages:
        r = self.records
        records = Records(r.file, r.offset + start * r.size, r.sums[start:stop], r.size)
        return DiskPages(records, self.columns, self.rows)

    def mapped(self, index: tuple[int, ...]) -> DiskPages:
        rows = index if self.rows is None else tuple(self.rows[i] for i in index)
        return DiskPages(self.records, self.columns, None if rows == tuple(range(self.columns[0].shape[0])) else rows)

    def joined(self, other: DiskPages) -> DiskPages | None:
        """Both runs as one, where `other` lies right behind this one in the file."""
        if self.columns != other.columns or self.rows != other.rows:
            return None
        records = self.records.joined(other.records)
        return None if records is None else DiskPages(records, self.columns, self.rows)


Run = HostPages | DiskPages
