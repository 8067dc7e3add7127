"""Side: the packed keys, or the packed values, of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops.decode_attention.cpu import native_half
from ..ops.dequantize import dequantize
from ..ops.gather_rows import gather_rows
from ..ops.packed import (
    Format,
    Packed,
    codes_shape,
    linear_scale,
    log_scale,
    pack_codes,
    scales_shape,
    unpack_codes,
)
from ..ops.quantize_pack import quantize


def half_for(device: torch.device) -> int:
    """Half the tile that suits the kernels of a device."""
    return native_half() or 32 if device.type == "cpu" else 32


def tiles_for(slots: int, half: int) -> int:
    """Tiles allocated when `slots` rows are packed: 1/32 more than needed, at least one."""
    needed = -(-slots // (2 * half))
    return needed + max(1, needed // 32)


class Side:
    """Buffers of codes, scales and zeros that grow by tiles."""

    def __init__(self, fmt: Format, role: str, half: int, dim: int) -> None:
        self.fmt, self.role, self.half, self.dim = fmt, role, half, dim
        self.tiles = 0  # allocated
        self.packed: Packed | None = None
        self.base: torch.Tensor | None = None  # [B, H, 1, 1] float32, where scales are 8-bit logarithms

    @property
    def tile_dim(self) -> int:
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

    def stored(self, scale: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
        return scale if base is None else log_scale(scale, base)

    def reserve(self, batch: int, heads: int, tiles: int, device: torch.device) -> None:
        """Room for `tiles` tiles; what is held stays."""
        if self.packed is not None and tiles <= self.tiles:
            return
        slots = tiles * 2 * self.half
        fmt = self.fmt
        groups = scales_shape(slots, self.dim, fmt)
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
                    dim = self.tile_dim if old is self.packed.codes else 2
                    into.narrow(dim, 0, old.shape[dim]).copy_(old)
        elif fmt.scale_bits == 8:
            self.base = torch.ones(batch, heads, 1, 1, dtype=torch.float32, device=device)
        self.packed, self.tiles = new, tiles

    def write(self, part: slice | torch.Tensor, slot: int, new: Packed, first_rows: bool) -> None:
        """Put freshly packed rows of the batch rows `part` at `slot`; the first tile may be half full."""
        assert self.packed is not None
        tile = 2 * self.half
        if self.base is not None:
            if first_rows:
                self.base[part] = (4 * new.scale.amax((2, 3), keepdim=True)).float().clamp(min=2**-14)
            new = new._replace(scale=log_scale(new.scale, self.base[part]))
        first, count = slot // tile, new.codes.shape[self.tile_dim]
        index: list[Any] = [part] + [slice(None)] * (self.tile_dim - 1)
        if slot % tile:
            self.packed.codes[(*index, first)] |= new.codes.select(self.tile_dim, 0)
            new, first, count = new._replace(codes=new.codes.narrow(self.tile_dim, 1, count - 1)), first + 1, count - 1
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
        groups = scales_shape(slots, self.dim, self.fmt)[0]
        table["codes"] = table["codes"].narrow(self.tile_dim, 0, tiles)
        return {name: t[:, :, :groups] if name in ("scale", "zero") else t for name, t in table.items()}

    def restore(self, table: dict[str, torch.Tensor]) -> None:
        """The reverse of `trimmed`, into buffers that have room."""
        assert self.packed is not None
        for name, tensor in table.items():
            if name == "base":
                self.base = tensor.clone()
                continue
            into = getattr(self.packed, name)
            dim = self.tile_dim if name == "codes" else 2
            # A file of larger tiles may end in a tile that has no rows here.
            length = min(tensor.shape[dim], into.shape[dim])
            into.narrow(dim, 0, length).copy_(tensor.narrow(dim, 0, length))

    def codes(self, slots: int) -> torch.Tensor:
        """Unpacked codes, uint8 `[B, H, slots, D]`."""
        assert self.packed is not None
        tiles = -(-slots // (2 * self.half))
        codes = self.packed.codes.narrow(self.tile_dim, 0, tiles)
        return unpack_codes(codes, self.fmt.bits, self.role, self.dim)[:, :, :slots]

    def joined(self, exact: torch.Tensor, front: int, slots: int) -> Packed:
        """All rows coded: the packed ones between exact ones (mapped, `[B, H, N, D]`; `front` of them go before)."""
        assert self.packed is not None
        codes, scale, zero = quantize(exact, self.fmt)
        held = (self.codes(slots), self.packed.scale[:, :, :slots], self.packed.zero)
        fresh = (codes, self.stored(scale, self.base), zero)
        parts = [
            None
            if new is None or old is None
            else torch.cat([new[:, :, :front], old[:, :, :slots], new[:, :, front:]], 2)
            for new, old in zip(fresh, held, strict=True)
        ]
        assert parts[0] is not None and parts[1] is not None
        whole = torch.nn.functional.pad(parts[0], (0, 0, 0, -parts[0].shape[2] % (2 * self.half)))
        return Packed(pack_codes(whole, self.fmt.bits, self.role, self.half), parts[1], parts[2])

    def take(self, rows: Packed, index: torch.Tensor) -> None:
        """Hold the rows `index` `[B, H, K]` of `rows`: their codes and scales move as they are."""
        slots = index.shape[2]
        base, self.packed, self.tiles, self.base = self.base, None, 0, None
        self.reserve(index.shape[0], index.shape[1], tiles_for(slots, self.half), index.device)
        self.base = None  # the scales are in their stored form already
        self.write(slice(None), 0, gather_rows(rows, self.fmt, self.role, self.dim, index, self.half), first_rows=False)
        self.base = base

    def decoded(self, slots: int) -> torch.Tensor:
        """float32 `[B, H, slots, D]`."""
        assert self.packed is not None
        tiles = -(-slots // (2 * self.half))
        codes = self.packed.codes.narrow(self.tile_dim, 0, tiles)
        return dequantize(self.rows(slots)._replace(codes=codes), self.fmt, self.role, self.dim, slots, torch.float32)

    def overwrite(self, slot: torch.Tensor, rows: torch.Tensor, where: torch.Tensor) -> None:
        """Write exact rows `[B, H, 1, D]` into slots `[B, H]`, one for each head, where `where` `[B, H]` is True."""
        assert self.packed is not None
        codes, scale, zero = quantize(rows, self.fmt)
        scale = self.stored(scale, self.base)
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
        """Forget the first `slots` slots (whole tiles and groups), and the room that they took."""
        assert self.packed is not None
        codes, scale, zero = self.packed
        tile = 2 * self.half
        step = self.fmt.group if self.fmt.axis == "channel" else 1
        left = -(-(used - slots) // tile)
        parts = Packed(
            codes.narrow(self.tile_dim, slots // tile, left),
            scale[:, :, slots // step : -(-used // step)],
            None if zero is None else zero[:, :, slots // step : -(-used // step)],
        )
        base, self.packed, self.tiles = self.base, None, 0
        self.reserve(codes.shape[0], codes.shape[1], tiles_for(used - slots, self.half), codes.device)
        self.base = base
        self.restore({name: t for name, t in parts._asdict().items() if t is not None})

    def batch_map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.packed is not None:
            codes, scale, zero = self.packed
            self.packed = Packed(fn(codes), fn(scale), None if zero is None else fn(zero))
            self.base = None if self.base is None else fn(self.base)


def clear_codes(side: Side, used: list[int], before: list[int]) -> None:
    """Zero the codes behind the slots in use: later blocks are merged into half-filled tiles."""
    assert side.packed is not None
    tile = 2 * side.half
    for b, (now, then) in enumerate(zip(used, before, strict=True)):
        if now >= then:
            continue
        first = now // tile
        dim = side.tile_dim - 1
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
