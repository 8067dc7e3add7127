"""PackedChain: a packed store whose older rows are read-only, and shared by copies.

    sealed: front | packed,  packed, ...  |  packed | tail

Each sealed part is a `PackedStore` without a tail. What comes later is packed with the statistics of the first part
(its key mean, the base of its scales), block after block, so the codes are those of a store that was never sealed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ..ops.packed import pack_codes, scales_shape
from .dense import EMPTY, DenseSegment, Rows, storages_of
from .packed import LazyRows, PackedStore, grown


class PackedChain(PackedStore):
    """Sealed parts, oldest first, and a store of its own that grows. Loses nothing beyond what the codec loses.

    A sealed part of one batch row stands for every batch row. `crop` into a sealed part copies it first.
    """

    def clear(self) -> None:
        self.sealed: list[PackedStore] = []
        super().clear()

    @classmethod
    def of(cls, store: PackedStore) -> PackedChain:
        """`store` with all but its tail sealed; the tail is taken over."""
        chain = store if isinstance(store, PackedChain) else cls(store.make)
        vars(chain).update({name: value for name, value in vars(store).items()})
        if store.has_packed or store.front is not None:
            chain._close()
        return chain

    def _close(self) -> None:
        part = PackedStore(self.make)
        for name in ("_codec", "front", "keys", "values", "slot_positions", "slot_scores", "mean", "_turns"):
            setattr(part, name, getattr(self, name))
        part.used, part.fronts, part.begun = list(self.used), list(self.fronts), list(self.begun)
        part.tail.replace(self.tail.rows.map(lambda t: t[:, :, :0].clone()))
        self.sealed.append(part)
        self.front = self.keys = self.values = self.slot_positions = self.slot_scores = None
        self.used = [0] * len(self.used)
        if self.mean is not None:
            self.mean = self.mean.clone()

    # ------------------------------------------------------------------ what it holds

    @property
    def in_parts(self) -> bool:
        return bool(self.sealed) or super().in_parts

    @property
    def packs(self) -> bool:
        return super().packs or any(part.packs for part in self.sealed)

    @property
    def has_holes(self) -> bool:
        return super().has_holes or any(part.has_holes for part in self.sealed)

    @property
    def length(self) -> int:
        return super().length + sum(part.length for part in self.sealed)

    @property
    def shared_tensors(self) -> list[torch.Tensor]:
        """The tensors of the sealed parts."""
        return [tensor for part in self.sealed for tensor in part._tensors()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; a sealed part that copies share counts in each of them."""
        return super().nbytes + sum(storages_of(self.shared_tensors).values())

    def _joined(self, name: str) -> torch.Tensor:
        own = super()._joined(name)
        parts = [part._joined(name) for part in self.sealed]
        heads = max(part.shape[1] for part in (*parts, own))
        return torch.cat([part.expand(own.shape[0], heads, -1) for part in (*parts, own)], dim=2)

    @property
    def rows(self) -> Rows:
        if not self.sealed:
            return super().rows
        rows = LazyRows(self, self.positions, None)
        rows.in_order = rows.in_order and all(len(set(part.used)) <= 1 for part in self.sealed)
        return rows

    def decoded(self, which: str) -> torch.Tensor:
        own = super().decoded(which)
        parts = [part.decoded(which).expand(own.shape[0], -1, -1, -1) for part in self.sealed]
        return torch.cat([*parts, own], dim=2)

    # ------------------------------------------------------------------ writing

    def reserve(self, rows: Rows, slots: int) -> None:
        first = self.keys is None
        super().reserve(rows, slots)
        if not first:
            return
        for mine, role in ((self.keys, "keys"), (self.values, "values")):
            older = [getattr(part, role) for part in self.sealed if part.has_packed]
            if mine is not None and mine.base is not None and older:
                mine.base = older[-1].base.expand(len(self.used), -1, -1, -1).clone()

    # ------------------------------------------------------------------ operations

    def crop(self, n: int, seen: int | None = None) -> None:
        if self.sealed and (seen is None or n > self.tail.length or self._sealed_up_to() > seen):
            vars(self).update(vars(self.flat()))
        super().crop(n, seen)

    def _sealed_up_to(self) -> int:
        return 1 + max(int(part.positions.max()) for part in self.sealed)

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor], lists: bool = True) -> None:
        self.sealed = [part if len(part.used) == 1 else _mapped(part, fn, lists) for part in self.sealed]
        super().batch_map(fn, lists)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedChain:
        twin = PackedChain(self.make)
        for name, value in vars(self).items():
            if name == "_attended":
                continue
            shared = name in ("make", "_codec", "_turns")
            setattr(twin, name, value if shared else list(value) if name == "sealed" else copy.deepcopy(value, memo))
        return twin

    def flat(self) -> PackedStore:
        """One store with copies of all packed rows, and this tail."""
        whole = PackedChain(self.make)
        own = {name: value for name, value in vars(self).items() if name != "sealed"}
        vars(whole).update(own)
        if not self.sealed:
            return whole
        stores: list[PackedStore] = [*self.sealed, _own(self)]
        batch = len(self.used)
        whole.front = None
        for store in stores:
            if store.front is not None:
                front = store.front.map(lambda t: t.expand(batch, *t.shape[1:]).clone())
                whole.front = front if whole.front is None else _filled(whole.front, front)
        packed = [store for store in stores if store.has_packed]
        whole.used = [sum(store.slots for store in self.sealed) + used if packed else 0 for used in self.used]
        if not packed:
            return whole
        slots = sum(store.slots for store in packed)
        tables = [store.slot_positions[:, :, : store.slots] for store in packed if store.slot_positions is not None]
        positions = torch.cat([table.expand(batch, -1, -1) for table in tables], dim=2)
        whole.keys = whole.values = whole.slot_positions = None
        PackedStore.reserve(whole, self.tail.rows, slots)
        assert whole.keys is not None and whole.values is not None and whole.slot_positions is not None
        room = whole.slot_positions.shape[2]
        whole.slot_positions = grown(positions, (batch, positions.shape[1], room), EMPTY, torch.int32, positions.device)
        for side in (whole.keys, whole.values):
            parts = [(getattr(store, side.role), store.slots) for store in packed]
            codes = torch.cat([part.codes(n).expand(batch, -1, -1, -1) for part, n in parts], dim=2)
            codes = F.pad(codes, (0, 0, 0, -codes.shape[2] % (2 * side.half)))
            table = {"codes": pack_codes(codes, side.fmt.bits, side.role, side.half)}
            for name in ("scale", "zero"):
                held = [(getattr(part.packed, name), n) for part, n in parts]
                if held[0][0] is not None:
                    cut = [t[:, :, : scales_shape(n, side.dim, side.fmt)[0]] for t, n in held]
                    table[name] = torch.cat([t.expand(batch, *t.shape[1:]) for t in cut], dim=2)
            if side.base is not None:
                table["base"] = parts[-1][0].base.expand(batch, -1, -1, -1)
            side.restore(table)
        return whole


def _own(chain: PackedChain) -> PackedStore:
    """What a chain holds beside its sealed parts."""
    store = PackedStore(chain.make)
    vars(store).update({name: value for name, value in vars(chain).items() if name != "sealed"})
    return store


def _filled(front: Rows, more: Rows) -> Rows:
    """`front` with its empty slots taken from `more`."""
    empty = front.positions == EMPTY
    wide = empty.expand(-1, front.keys.shape[1], -1)[..., None]
    return Rows(
        torch.where(wide, more.keys, front.keys),
        torch.where(wide, more.values, front.values),
        torch.where(empty, more.positions, front.positions),
    )


def _mapped(part: PackedStore, fn: Callable[[torch.Tensor], torch.Tensor], lists: bool) -> PackedStore:
    """A part with `fn` applied to every tensor; the one given stays as it is."""
    twin = PackedStore(part.make)
    vars(twin).update(vars(part))
    twin.tail = DenseSegment.of(part.tail.rows)
    twin.keys, twin.values = copy.copy(part.keys), copy.copy(part.values)
    twin.batch_map(fn, lists)
    return twin


__all__ = ["PackedChain"]
