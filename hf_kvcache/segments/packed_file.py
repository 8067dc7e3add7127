"""Packed rows in files: what is written, what is checked before anything is believed, and the way back."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.packed import codes_shape, pack_codes, scales_shape, unpack_codes
from .dense import EMPTY, Rows
from .packed import PackedStore, grown


def state_of(store: PackedStore) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
    """JSON-able state and tensors, without slack. The state is None while nothing is packed."""
    store = store.flat()
    parts = dict(store.tail.rows.tensors())
    if not store.has_packed and store.front is None:
        return None, parts
    half = None
    if store.has_packed and store.keys is not None and store.values is not None and store.slot_positions is not None:
        half = store.keys.half
        parts["packed.positions"] = store.slot_positions[:, :, : store.slots]
        if store.slot_scores is not None:
            parts["packed.scores"] = store.slot_scores[:, :, : store.slots]
        if store.mean is not None:
            parts["packed.mean"] = store.mean
        for side in (store.keys, store.values):
            parts |= {f"packed.{side.role}.{name}": t for name, t in side.trimmed(store.slots).items()}
    if store.front is not None:
        parts |= {f"packed.front.{name}": tensor for name, tensor in store.front.tensors().items()}
    begun = store.begun if store.has_packed else [0] * len(store.begun)  # statistics are kept with the rows
    numbers = {"used": store.used, "fronts": store.fronts, "begun": begun}
    return {**numbers, "ragged": store.is_ragged, "half": half}, parts


def check_state(store: PackedStore, state: Any, parts: dict[str, torch.Tensor], tail: Rows, seen: int) -> None:
    """Raise `ValueError` unless these make a store of this codec. Changes nothing."""
    if state is None:
        if parts:
            raise ValueError("packed rows without their description")
        return
    batch, heads, _, key_dim = tail.keys.shape
    value_dim = tail.values.shape[-1]
    codec = store.make(key_dim, value_dim)
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
    if any(count % codec.block for count in used) or any(n and not b for n, b in zip(used, begun, strict=True)):
        raise ValueError(f"packed rows that end within a block, or without statistics: used {used!r}, begun {begun!r}")
    if not isinstance(state["ragged"], bool):
        raise ValueError(f"ragged is {state['ragged']!r}")
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
            groups = scales_shape(slots, dim, fmt)
            expected[f"packed.{role}.codes"] = (
                codes_shape((batch, heads, whole, dim), fmt.bits, role, half),
                torch.uint8,
            )
            kind = torch.float16 if fmt.scale_bits == 16 else torch.uint8
            expected[f"packed.{role}.scale"] = ((batch, heads, *groups), kind)
            if fmt.has_zero:
                expected[f"packed.{role}.zero"] = ((batch, heads, *groups), torch.float16)
            if fmt.scale_bits == 8:
                expected[f"packed.{role}.base"] = ((batch, heads, 1, 1), torch.float32)
    if any(name.startswith("packed.front.") for name in parts):
        sinks = codec.num_sink_tokens
        shapes: dict[str, tuple[int, ...] | None] = {
            "keys": (batch, heads, sinks, key_dim),
            "values": (batch, heads, sinks, value_dim),
            "positions": None,
            "scores": (batch, heads, sinks),
        }
        for name, like in tail.tensors().items():
            expected[f"packed.front.{name}"] = (shapes[name], like.dtype)
    if set(expected) != set(parts):
        raise ValueError(f"packed tensors {sorted(parts)} where {sorted(expected)} belong")
    for name, (shape, dtype) in expected.items():
        tensor = parts[name]
        if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != tuple(shape)):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite")
        if name.endswith("positions"):
            own = (batch, slots if name == "packed.positions" else codec.num_sink_tokens)
            if tensor.ndim != 3 or tensor.shape[1] not in (1, heads) or tensor.shape[::2] != own:
                raise ValueError(f"{name} is of shape {tuple(tensor.shape)}")
            if tensor.numel() and (int(tensor.max()) >= seen or int(tensor.min()) < EMPTY):
                raise ValueError("positions beyond the tokens seen")


def load_state(store: PackedStore, state: dict[str, Any], parts: dict[str, torch.Tensor], tail: Rows) -> None:
    """The reverse of `state`, on checked parts."""
    store.clear()
    store.meet(tail)
    store.used, store.fronts, store.begun = list(state["used"]), list(state["fronts"]), list(state["begun"])
    store.is_ragged = state["ragged"]
    front = {name[13:]: t.clone() for name, t in parts.items() if name.startswith("packed.front.")}
    store.front = Rows(**front) if front else None
    store.tail.replace(tail, store.codec.block)
    if not store.has_packed:
        return
    store.mean = parts.get("packed.mean")
    store.reserve(tail, store.slots)
    assert store.keys is not None and store.values is not None and store.slot_positions is not None
    positions = parts["packed.positions"]
    store.slot_positions = grown(
        positions, (*positions.shape[:2], store.slot_positions.shape[2]), EMPTY, torch.int32, positions.device
    )
    if store.slot_scores is not None and "packed.scores" in parts:
        store.slot_scores[:, :, : store.slots] = parts["packed.scores"]
    for side in (store.keys, store.values):
        mine = {name.rpartition(".")[2]: t for name, t in parts.items() if name.startswith(f"packed.{side.role}.")}
        if state["half"] != side.half:
            codes = unpack_codes(mine["codes"], side.fmt.bits, side.role, side.dim)
            codes = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[2] % (2 * side.half)))
            mine["codes"] = pack_codes(codes, side.fmt.bits, side.role, side.half)
        side.restore(mine)
