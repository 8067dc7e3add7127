"""What moves between tiers: the staging buffers of a device, prefetching, traffic, and the faster way to attend."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from .config import Offload
from .disk import DiskTier

PROBE_BYTES = 1 << 25


@dataclass
class Traffic:
    """Bytes of keys and values moved so far, and how often a layer's pages were there before they were needed."""

    to_device: int = 0
    to_host: int = 0
    to_disk: int = 0
    from_disk: int = 0
    fetched: int = 0  # times that a layer's pages were copied to the device
    prefetched: int = 0  # ... of these, ahead of time, and used


class Slot:
    """One layer's worth of staging: a flat buffer, and whose rows are in it."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.forget()

    def forget(self) -> None:
        self.owner: weakref.ref[Any] | None = None
        self.away = -1  # the owner's version of what has left the device
        self.version = -1  # the owner's version of everything; -1: what is on the device was not copied yet
        self.room = 0
        self.ready: torch.cuda.Event | None = None

    def holds(self, store: Any) -> bool:
        owner = None if self.owner is None else self.owner()
        return owner is not None and owner is store and self.away == owner.away_version

    def reserve(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.buffer is None or self.buffer.numel() < nbytes or self.buffer.device != device:
            self.buffer = None  # before its successor is there: two buffers, never three
            with torch.inference_mode(False):
                self.buffer = torch.empty(nbytes + nbytes // 16, dtype=torch.uint8, device=device)
        return self.buffer


class Staging:
    """The two buffers of one device that layers take turns with: one attends while the next one's pages arrive."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = (Slot(), Slot())
        self.last = 1  # the slot that was handed out last
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.peak = 0

    @property
    def nbytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self.slots if slot.buffer is not None)

    def fetch(self, store: Any, follower: Any | None, traffic: Traffic) -> Slot:
        """The slot with all rows of `store`; begins to fetch what has left the device of `follower`."""
        index = next((i for i, slot in enumerate(self.slots) if slot.holds(store)), None)
        if index is not None and self.slots[index].room < store.staged_need:
            index = None
        if index is None:
            index = 1 - self.last
            self._fill(self.slots[index], store, store.staged_need, traffic)
        elif self.slots[index].version == -1:
            traffic.prefetched += 1
        slot = self.slots[index]
        if slot.ready is not None:
            slot.ready.wait(torch.cuda.current_stream(self.device))
            slot.ready = None
        if slot.version != store.version:
            store.stage_resident(slot)
            slot.version = store.version
        self.last = index
        if follower is not None and not any(other.holds(follower) for other in self.slots):
            other = self.slots[1 - index]
            if self.stream is None:
                self._fill(other, follower, store.staged_need, traffic)
            else:
                # What was queued so far still reads the buffer that is written next.
                self.stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self.stream):
                    self._fill(other, follower, store.staged_need, traffic)
                    other.ready = self.stream.record_event()
                assert other.buffer is not None
                other.buffer.record_stream(self.stream)
        return slot

    def _fill(self, slot: Slot, store: Any, least: int, traffic: Traffic) -> None:
        # A layer that is prefetched is about to be given as many tokens as the one before it.
        slot.forget()
        slot.room = store.staged_room(least)
        slot.reserve(store.staged_bytes(slot.room), self.device)
        self.peak = max(self.peak, self.nbytes)
        store.stage_away(slot)
        slot.owner, slot.away = weakref.ref(store), store.away_version
        traffic.fetched += 1

    def clear(self) -> None:
        for slot in self.slots:
            slot.buffer = None
            slot.forget()


@dataclass
class Offloader:
    """What the offloaded layers of one cache have in common."""

    config: Offload
    layers: int  # how many share the host memory
    disk: DiskTier | None = None
    traffic: Traffic = field(default_factory=Traffic)
    staging: dict[torch.device, Staging] = field(default_factory=dict)
    stores: list[weakref.ref[Any]] = field(default_factory=list)  # in the order of the layers; weak: no cycles

    @staticmethod
    def of(config: Offload, layers: int) -> Offloader:
        disk = None if config.disk is None else DiskTier(os.fspath(config.disk))
        return Offloader(config, layers, disk)

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloader:
        twin = Offloader(self.config, self.layers, self.disk)
        memo[id(self)] = twin
        return twin

    @property
    def host_share(self) -> int | None:
        """Host bytes of each layer, or None without a limit."""
        if self.disk is None or self.disk.failed or self.config.host_bytes is None:
            return None
        return self.config.host_bytes // max(1, self.layers)

    @property
    def pinned(self) -> bool:
        return self.config.pin_memory and torch.cuda.is_available()

    @property
    def nbytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(staging.nbytes for staging in self.staging.values())

    def register(self, store: Any) -> None:
        self.stores = [ref for ref in self.stores if ref() is not None] + [weakref.ref(store)]

    def fetch(self, store: Any, device: torch.device) -> Slot:
        if device not in self.staging:
            self.staging[device] = Staging(device)
        return self.staging[device].fetch(store, self._follower(store, device), self.traffic)

    def _follower(self, store: Any, device: torch.device) -> Any | None:
        """The next layer, where it has pages to fetch to the same device."""
        index = next((i for i, ref in enumerate(self.stores) if ref() is store), len(self.stores))
        following = self.stores[index + 1]() if index + 1 < len(self.stores) else None
        return following if following is not None and following.is_away and following.device == device else None

    def release(self) -> None:
        """Give the staging buffers back."""
        for staging in self.staging.values():
            staging.clear()

    def restart(self) -> None:
        """Everything is forgotten: staging too, and that the disk was full."""
        self.release()
        if self.disk is not None:
            self.disk.failed = False

    def attend_mode(self, device: torch.device, dtype: torch.dtype) -> str:
        """`"fetch"` or `"compute"`."""
        return faster_mode(device, dtype) if self.config.attend == "auto" else self.config.attend

    def try_write(self, write: Callable[[DiskTier], Any]) -> Any | None:
        """The result of `write`, or None where the disk does not take it (said once; the tokens stay in memory)."""
        disk = self.disk
        if disk is None or disk.failed:
            return None
        try:
            return write(disk)
        except OSError as error:
            disk.failed = True
            warnings.warn(
                f"hf_kvcache: cannot write to {disk.parent} ({error}); tokens that are not written yet stay in host "
                "memory, beyond `host_bytes`. Nothing is lost.",
                stacklevel=2,
            )
            return None


@cache
def faster_mode(device: torch.device, dtype: torch.dtype) -> str:
    """Which way older rows are attended to faster, measured once for each device and dtype.

    Bytes per second of a copy from host memory against those of one query's attention on the CPU. Where the model runs
    on the CPU nothing has to travel, and attention where the rows lie is never slower than a copy and attention.
    """
    if device.type == "cpu":
        return "compute"
    pin = torch.cuda.is_available()
    rows = PROBE_BYTES // (2 * 8 * 128 * dtype.itemsize)
    with torch.inference_mode(False), torch.no_grad():
        keys, values = (torch.zeros(8, rows, 128, dtype=dtype, pin_memory=pin) for _ in range(2))
        query = torch.zeros(8, 4, 128, dtype=dtype)
        target = torch.empty(keys.shape, dtype=dtype, device=device)

        def copy() -> None:
            target.copy_(keys, non_blocking=True)
            target.copy_(values, non_blocking=True)
            _synchronize(device)

        def attend() -> None:
            weights = torch.softmax(torch.matmul(query, keys.transpose(1, 2)).float(), dim=-1)
            torch.matmul(weights.to(dtype), values)

        return "fetch" if _seconds(copy) < _seconds(attend) else "compute"


def _synchronize(device: torch.device) -> None:
    module = getattr(torch, device.type, None)
    if module is not None and hasattr(module, "synchronize"):
        module.synchronize()


def _seconds(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
