"""OffloadedStore: the rows of one layer, the newest on the compute device, older ones in host memory or in files.

pages on disk  |  pages in host memory  |  resident tail
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..offload.attend import page_scores
from ..offload.disk import DiskTier, PageFile
from ..offload.host import DiskPages, HostPages, Pair, Run
from ..offload.transfer import Offloader, Slot
from .dense import EMPTY, DenseSegment, Rows

RUN_BYTES = 1 << 26  # most bytes of one buffer in host memory
SPARE = 32  # rows that a staging buffer has room for beyond those at hand


class OffloadedRows(Rows):
    """All rows of a store; keys and values are brought to the device only where somebody reads them.

    `keys` and `values` may lie in a staging buffer: they are good until the next layer but one is read.
    """

    def __init__(self, store: OffloadedStore) -> None:
        self._store = store
        self.positions = store.positions
        self.scores = None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return self._store.staged()[0]

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self._store.staged()[1]

    @property
    def length(self) -> int:
        return self.positions.shape[-1]

    def owned(self, which: str) -> torch.Tensor:
        """Keys or values as a tensor of their own."""
        return self._store.owned(which)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of their own."""
        return {"keys": self.owned("keys"), "values": self.owned("values"), "positions": self.positions}

    def none(self) -> Rows:
        return self._store.tail.rows.none()


class OffloadedStore:
    """Full-precision rows, in whole pages beyond the newest ones. Lossless.

    The interface is that of `Chain`. Bytes on the device: the tail as in `DenseSegment`, 4 for the position of each
    row, and with `top_pages` the least and greatest of each key channel of each page. Bytes elsewhere: keys and values.
    """

    def __init__(self, offloader: Offloader) -> None:
        self.offloader = offloader
        self.page = offloader.config.page
        self.tail = DenseSegment()
        self.away_version = 0
        self.version = 0
        self._file: PageFile | None = None
        self._forget()
        offloader.register(self)

    def _forget(self) -> None:
        self.runs: list[Run] = []
        self.away_positions: torch.Tensor | None = None  # [B, H|1, rows]
        self.low: torch.Tensor | None = None  # [B, H, pages, D]
        self.high: torch.Tensor | None = None
        self._changed()

    def _changed(self, away: bool = True) -> None:
        self.version += 1
        self.away_version += away

    def clear(self) -> None:
        self.tail.clear()
        self._forget()
        self._file = None
        self.offloader.restart()

    # ------------------------------------------------------------------ what it holds

    @property
    def away_pages(self) -> int:
        """Pages that have left the device."""
        return sum(run.pages for run in self.runs)

    @property
    def away_rows(self) -> int:
        return self.away_pages * self.page

    @property
    def is_away(self) -> bool:
        return bool(self.runs)

    @property
    def length(self) -> int:
        return self.away_rows + self.tail.length

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    @property
    def device(self) -> torch.device:
        return self.tail.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, KV heads, key size, value size)."""
        return self.tail.shape

    @property
    def element_size(self) -> int:
        return self.tail.element_size

    def tier_bytes(self) -> dict[str, int]:
        """Bytes of all storage, by tier; runs that copies of the cache share count in each of them."""
        tables = [t for t in (self.away_positions, self.low, self.high) if t is not None]
        tiers = {"device": self.tail.nbytes + sum(t.untyped_storage().nbytes() for t in tables), "host": 0, "disk": 0}
        for run in self.runs:
            tiers[run.tier] += run.nbytes
        return tiers

    @property
    def nbytes(self) -> int:
        return sum(self.tier_bytes().values())

    @property
    def positions(self) -> torch.Tensor:
        """`[B, H|1, N]` positions of all rows."""
        tail = self.tail.rows.positions
        if self.away_positions is None:
            return tail
        heads = max(tail.shape[1], self.away_positions.shape[1])
        return torch.cat([self.away_positions.expand(-1, heads, -1), tail.expand(-1, heads, -1)], dim=2)

    @property
    def rows(self) -> Rows:
        return OffloadedRows(self) if self.runs else self.tail.rows

    @property
    def parts(self) -> list[Rows]:
        return [] if self.is_empty else [self.rows]

    # ------------------------------------------------------------------ reading

    def staged(self) -> Pair:
        """All keys and values `[B, H, N, D]` on the device, in a staging buffer."""
        if torch.is_grad_enabled():
            return self.owned("keys"), self.owned("values")  # a graph may keep them
        slot = self.offloader.fetch(self, self.device)
        n = self.length
        keys, values = self._views(slot)
        return keys[:, :, :n], values[:, :, :n]

    @property
    def staged_need(self) -> int:
        return self.length

    def staged_room(self, least: int) -> int:
        return max(self.length, least) + SPARE

    def staged_bytes(self, room: int) -> int:
        batch, heads, key_dim, value_dim = self.shape
        return batch * heads * room * (key_dim + value_dim) * self.element_size

    def _views(self, slot: Slot) -> Pair:
        batch, heads, key_dim, value_dim = self.shape
        assert slot.buffer is not None
        flat = slot.buffer[: self.staged_bytes(slot.room)].view(self.tail.rows.keys.dtype)
        cut = batch * heads * slot.room * key_dim
        return flat[:cut].view(batch, heads, slot.room, key_dim), flat[cut:].view(batch, heads, slot.room, value_dim)

    def stage_away(self, slot: Slot) -> None:
        """Copy the pages that have left the device into `slot`."""
        keys, values = self._views(slot)
        start = 0
        for run in self.runs:
            stop = start + run.pages * self.page
            run.copy_into(keys[:, :, start:stop], values[:, :, start:stop])
            start = stop
        self._count(self.runs, keys.device)

    def stage_resident(self, slot: Slot) -> None:
        """Copy the tail behind them."""
        rows, (keys, values) = self.tail.rows, self._views(slot)
        keys[:, :, self.away_rows : self.length].copy_(rows.keys)
        values[:, :, self.away_rows : self.length].copy_(rows.values)

    def _count(self, runs: list[Run], device: torch.device | None) -> None:
        for run in runs:
            size = run.pages * self._page_bytes
            self.offloader.traffic.from_disk += size if run.tier == "disk" else 0
            self.offloader.traffic.to_device += size if device is not None else 0

    @property
    def _page_bytes(self) -> int:
        batch, heads, key_dim, value_dim = self.shape
        return batch * heads * self.page * (key_dim + value_dim) * self.element_size

    def owned(self, which: str) -> torch.Tensor:
        """All keys or values `[B, H, N, D]` on the device, as a tensor of their own."""
        tail = getattr(self.tail.rows, which)
        index = ("keys", "values").index(which)
        return torch.cat([*(pair[index].to(tail.device) for pair in self.pieces()), tail], dim=2)

    def pieces(self) -> Iterator[Pair]:
        """The rows that have left the device, in order, on the CPU; those on disk are read a piece at a time."""
        for run in self.runs:
            self._count([run], None)
            yield from run.pieces()

    def computes(self, query: torch.Tensor) -> bool:
        """Whether pages are attended to on the CPU."""
        return self.offloader.attend_mode(query.device, query.dtype) == "compute"

    def unstage(self) -> None:
        """Give back the staging buffers of a long step, which steps over pages where they lie do not need."""
        if self.offloader.nbytes:
            self.offloader.release()

    # ------------------------------------------------------------------ top pages

    def _able(self, rows: int) -> int:
        """Pages that a query at the end of `rows` rows chooses from: those that leave when tokens come one by one."""
        return self.offloader.config.pages_of(rows - 1)

    def selects(self, new: int) -> bool:
        """Whether some of the newest `new` tokens leaves pages out."""
        config = self.offloader.config
        if self.low is None:
            return False
        able = [self._able(self.length - i) for i in range(new)]
        return any(config.wanted(pages) < pages for pages in able)

    def chosen(self, query: torch.Tensor, rows: int, scaling: float) -> tuple[torch.Tensor, int]:
        """Pages `[B, H, k]` for a query `[B, Hq, 1, D]` at the end of `rows` rows, in order, and the row from which on
        all are read. Depends on the rows alone, not on which of them have left the device already.
        """
        assert self.low is not None and self.high is not None
        able, away = self._able(rows), self.away_pages
        low, high = self.low[:, :, :able], self.high[:, :, :able]
        if able > away:
            tail, n = self.tail.rows, (able - away) * self.page
            near = page_bounds(tail.keys[:, :, :n], tail.positions[:, :, :n], self.page)
            low, high = (torch.cat(pair, dim=2) for pair in zip((low, high), near, strict=True))
        wanted = self.offloader.config.wanted(able)
        pages = page_scores(query, low, high, scaling).topk(wanted, dim=-1).indices.sort(dim=-1).values
        if away > able:  # they left before a rollback
            forced = torch.arange(able, away, device=pages.device)
            pages = torch.cat([pages, forced.expand(*pages.shape[:2], -1)], dim=-1)
        return pages, max(able, away) * self.page

    def gather(self, pages: torch.Tensor, device: torch.device) -> Pair:
        """Keys and values `[B, H, k * page, D]` of pages `[B, H, k]`, on `device`."""
        index, away = pages.to("cpu"), self.away_pages
        batch, heads, key_dim, value_dim = self.shape
        dtype = self.tail.rows.keys.dtype
        pin = self.offloader.pinned and device.type == "cuda"
        out = [torch.empty(*index.shape, self.page, dim, dtype=dtype, pin_memory=pin) for dim in (key_dim, value_dim)]
        start = 0
        for run in self.runs:
            where = ((index >= start) & (index < start + run.pages)).nonzero().unbind(1)
            if where[0].numel():
                row, head, _ = where
                for into, found in zip(out, run.pick(row, head, index[where] - start), strict=True):
                    into[where] = found
            start += run.pages
        where = (index >= away).nonzero().unbind(1)
        if where[0].numel():  # pages that have not left yet
            row, head, _ = where
            for into, tensor in zip(out, (self.tail.rows.keys, self.tail.rows.values), strict=True):
                whole = tensor[:, :, : tensor.shape[2] // self.page * self.page].to("cpu")
                whole = whole.unflatten(2, (whole.shape[2] // self.page, self.page))
                into[where] = whole[row, head, index[where] - away]
        if device.type != "cpu":
            self.offloader.traffic.to_device += sum(t.numel() * t.element_size() for t in out)
        keys, values = (t.flatten(2, 3).to(device, non_blocking=True) for t in out)
        return keys, values

    # ------------------------------------------------------------------ writing

    def append(self, rows: Rows) -> None:
        """New rows go to the tail; a first prompt goes where it belongs at once."""
        pages = self.offloader.config.pages_of(rows.length) if self.is_empty else 0
        if pages and not _in_graph(rows):
            self.tail.clear()
            self._start(rows, pages, self.page)
            return
        self.tail.append(rows)
        self._changed(away=False)

    def replace(self, rows: Rows, reserve: int = 0) -> None:
        """Hold exactly `rows`."""
        self._forget()
        pages = 0 if _in_graph(rows) else self.offloader.config.pages_of(rows.length)
        if pages:
            self._start(rows, pages, max(reserve, self.page))
        else:
            self.tail.replace(rows, reserve)

    def leave(self, trained: bool = False) -> None:
        """Move whole pages beyond the newest `resident_length` rows off the device.

        Rows that gradients may still pass through stay, unless the training step is over (`trained`).
        """
        if self.tail.is_empty:
            return
        pages = self.offloader.config.pages_of(self.length) - self.away_pages
        if pages > 0 and (trained or not _in_graph(self.tail.rows)):
            self._start(self.tail.rows, pages, self.page)

    def _start(self, rows: Rows, pages: int, reserve: int) -> None:
        """Take the first `pages` pages of `rows`, and hold the rest in the tail."""
        cut = pages * self.page
        rows = rows.map(lambda t: t.detach())
        self._take(rows.map(lambda t: t[:, :, :cut]), pages)
        self.tail.replace(rows.map(lambda t: t[:, :, cut:]), reserve)
        self._spill()
        self._changed()

    def _take(self, rows: Rows, pages: int) -> None:
        if self.away_positions is None:
            self.away_positions = rows.positions.clone()
        else:
            heads = max(self.away_positions.shape[1], rows.positions.shape[1])
            both = (self.away_positions, rows.positions)
            self.away_positions = torch.cat([t.expand(-1, heads, -1) for t in both], dim=2)
        if self.offloader.config.top_pages is not None:
            bounds = page_bounds(rows.keys, rows.positions, self.page)
            old = (self.low, self.high)
            self.low, self.high = (
                new if held is None else torch.cat([held, new], dim=2) for held, new in zip(old, bounds, strict=True)
            )
        size = rows.keys.shape[0] * rows.keys.shape[1] * self.page * rows.keys.element_size()
        size *= rows.keys.shape[3] + rows.values.shape[3]
        most = max(1, RUN_BYTES // size)
        share = self.offloader.host_share
        if share is not None:
            most = max(1, min(most, share // size // 8))  # small enough to leave one by one
        done = 0
        while done < pages:
            last = self.runs[-1] if self.runs else None
            if last is None or not last.room:
                room = min(max(pages - done, self.away_pages // 16), most)
                like = (rows.keys[:, :, :0], rows.values[:, :, :0])
                self.runs.append(HostPages.empty(like, self.page, room, self.offloader.pinned))
                last = self.runs[-1]
            assert isinstance(last, HostPages)
            count = min(last.room, pages - done)
            span = slice(done * self.page, (done + count) * self.page)
            last.add(rows.keys[:, :, span], rows.values[:, :, span])
            done += count
        self.offloader.traffic.to_host += pages * size

    def _spill(self) -> None:
        """Write the oldest runs to disk, while this layer holds more than its share of host memory."""
        while True:
            share = self.offloader.host_share
            held = [i for i, run in enumerate(self.runs) if run.tier == "host"]
            if share is None or not held or sum(self.runs[i].nbytes for i in held) <= share:
                return
            run = self.runs[held[0]]
            assert isinstance(run, HostPages)
            written = self.offloader.try_write(lambda disk, run=run: run.to_disk(self._page_file(disk)))  # type: ignore[misc]
            if written is None:
                return
            self.offloader.traffic.to_disk += written.nbytes
            self.runs[held[0]] = written
            before = self.runs[held[0] - 1] if held[0] else None
            joined = before.joined(written) if isinstance(before, DiskPages) else None
            if joined is not None:
                self.runs[held[0] - 1 : held[0] + 1] = [joined]

    def _page_file(self, disk: DiskTier) -> PageFile:
        self._file = disk.file_for(self._file)
        return self._file

    def overwrite(self, slot: torch.Tensor) -> None:
        raise NotImplementedError("rows that have left the device are not overwritten")

    def mark(self, positions: torch.Tensor) -> None:
        """Rewrite the positions of the newest rows."""
        self.tail.rows.positions[:, :, -positions.shape[-1] :].copy_(positions)

    def seal(self) -> None:
        """Nothing to do: copies share all pages that have left the device, and copy the short tail."""

    def crop(self, n: int, seen: int | None = None) -> None:
        """Forget the last `n` rows; the rest of a page that is cut comes back to the device."""
        cut = min(n, self.tail.length)
        self.tail.crop(cut)
        self._changed(away=False)
        left = self.away_rows - (n - cut)
        if n == cut:
            return
        assert self.away_positions is not None
        pages, rest = divmod(max(0, left), self.page)
        like = self.tail.rows
        keys, values, start = like.keys[:, :, :0], like.values[:, :, :0], 0
        kept: list[Run] = []
        for run in self.runs:
            if start + run.pages <= pages:
                kept.append(run)
            elif start <= pages:
                inside = pages - start
                if rest:
                    pairs = list(run.part(inside, inside + 1).pieces())
                    keys, values = (pairs[0][i][:, :, :rest].to(self.device) for i in range(2))
                if inside:
                    kept.append(run.part(0, inside))
            start += run.pages
        self.runs = kept
        positions = self.away_positions
        self.away_positions = positions[:, :, : pages * self.page].clone() if pages else None
        if self.low is not None and self.high is not None:
            self.low, self.high = (t[:, :, :pages].clone() if pages else None for t in (self.low, self.high))
        self.tail.replace(Rows(keys, values, positions[:, :, pages * self.page : pages * self.page + rest]), self.page)
        self._changed()

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a batch operation: to tensors on the device, and to whose rows are whose elsewhere."""
        index = tuple(fn(torch.arange(self.shape[0])).tolist())
        self.tail.batch_map(fn)
        self.runs = [run.mapped(index) for run in self.runs]
        for name in ("away_positions", "low", "high"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else fn(tensor))
        self._changed()

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedStore:
        twin = OffloadedStore(copy.deepcopy(self.offloader, memo))
        memo[id(self)] = twin
        twin.tail = copy.deepcopy(self.tail, memo)
        for run in self.runs:
            if isinstance(run, HostPages):
                run.is_open = False
        twin.runs = list(self.runs)
        for name in ("away_positions", "low", "high"):
            tensor = getattr(self, name)
            setattr(twin, name, None if tensor is None else tensor.clone())
        return twin


def page_bounds(keys: torch.Tensor, positions: torch.Tensor, page: int) -> Pair:
    """Least and greatest of each channel over the real rows of each page, `[B, H, pages, D]`.

    A page of padding alone has a least above its greatest.
    """
    empty = (positions == EMPTY)[..., None]
    if bool(empty.any()):
        low, high = keys.masked_fill(empty, float("inf")), keys.masked_fill(empty, float("-inf"))
    else:
        low = high = keys
    split = (keys.shape[2] // page, page)
    return low.unflatten(2, split).amin(3), high.unflatten(2, split).amax(3)


def _in_graph(rows: Rows) -> bool:
    return rows.keys.requires_grad or rows.values.requires_grad
