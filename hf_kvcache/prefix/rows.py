"""From a cache to what a store keeps of it, and back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .. import storage
from ..cache import KVCache
from ..layer import KVLayer
from ..segments import Chain, OffloadedPackedStore, PackedChain, PackedStore, PagedSegment, Rows
from ..sharing import FollowerLayer
from .tree import Block, State, tensors_of

# Sealed parts of packed rows that a state may have; beyond, they are copied into one. Attention goes over each.
MOST_PARTS = 6


def is_cuttable(layer: Any) -> bool:
    """Whether the rows of a layer can be cut at any token: full attention in full precision."""
    return type(layer) is KVLayer and type(layer.segments) is Chain and not layer.is_sliding


def cuttable(cache: KVCache) -> list[int]:
    return [index for index, layer in enumerate(cache.layers) if is_cuttable(layer)]


def others(cache: KVCache) -> list[int]:
    """Layers of which only what they hold at the end of a text can be kept."""
    holds_nothing = ("DummyLayer", "FollowerLayer")
    return [
        i
        for i, layer in enumerate(cache.layers)
        if not is_cuttable(layer) and type(layer).__name__ not in holds_nothing
    ]


def kinds(cache: KVCache) -> str:
    """Those layers in words."""
    found = set()
    for index in others(cache):
        layer = cache.layers[index]
        codec = isinstance(layer, KVLayer) and isinstance(layer.segments, PackedStore)
        found.add("a codec's packed rows" if codec else type(layer).__name__)
    return ", ".join(sorted(found))


def check(cache: Any) -> None:
    """Refuse, with the reason, caches of which a prefix cannot be shared."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"a PrefixStore holds rows of caches of this library, got {type(cache).__name__}")
    name = type(cache).__name__
    if cache.policy.drops:
        raise ValueError(
            f"{name} drops tokens, and which ones depends on the text that follows a prefix, so the prefix cannot be "
            "shared. Use KVCache, with a codec where bytes matter."
        )
    for layer in cache.kv_layers:
        if isinstance(layer.segments, PagedSegment):
            raise NotImplementedError(
                f"{name}: rows of a pool are shared by copies of the cache (`copy.deepcopy`), not by a PrefixStore. "
                "Leave `pool` out, or copy a cache that holds the prefix."
            )
        if not isinstance(layer.segments, Chain | PackedStore) or isinstance(layer.segments, OffloadedPackedStore):
            raise NotImplementedError(
                f"{name}: pages in host memory belong to one cache, and a PrefixStore shares rows where they are. "
                "Leave `offload` out."
            )


def seen(cache: KVCache) -> int:
    """Tokens given to a cache; steps that are still open are ended."""
    for layer in cache.kv_layers:
        layer.settle()
    return cache.get_seq_length()


def check_whole(cache: KVCache) -> None:
    """Refuse caches whose rows are not those of `tokens 0, 1, 2...` of each batch row."""
    for layer in cache.kv_layers:
        if layer.is_sliding:
            continue
        if layer.has_empty or not layer.complete:
            raise ValueError(
                "this cache holds padding, or was cut within packed rows: its rows are not those of the token ids "
                "alone. Use `store.generate`, or put rows without padding."
            )


@torch.no_grad()
def blocks_of(cache: KVCache, row: int, start: int, stop: int) -> list[tuple[Block, int, int]]:
    """Rows `start:stop` of one batch row: (block, first row of it, rows).

    A cache of one batch row shares its own buffers: they become read-only there too. Of several, rows are copied.
    """
    layers = [cache.layers[index] for index in cuttable(cache)]
    if not layers:
        return [(Block([], stop - start), 0, stop - start)]
    if all(layer._batch == 1 for layer in layers):
        for layer in layers:
            layer.seal()
        lengths = [[segment.length for segment in layer.segments.sealed] for layer in layers]
        if all(other == lengths[0] for other in lengths):
            found, first = [], 0
            for number, length in enumerate(lengths[0]):
                a, b = max(start, first), min(stop, first + length)
                if a < b:
                    tables = [layer.segments.sealed[number].rows for layer in layers]
                    found.append(_block(tables, length, a - first, b - a))
                first += length
            return found
    tables = [_slice(layer.segments.parts, row, start, stop) for layer in layers]
    return [(Block(tables, stop - start), 0, stop - start)]


def _block(tables: list[Rows], length: int, start: int, rows: int) -> tuple[Block, int, int]:
    tables = [table.map(_plain) for table in tables]
    block = Block(tables, length)
    if 2 * rows >= length:
        return block, start, rows
    # The rest of the buffers, which nobody asked to keep, would be held alive.
    return Block([table.map(torch.clone) for table in block.cut(start, start + rows)], rows), 0, rows


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that any later step can read: no graph, and not of `torch.inference_mode`, whose tensors stay in it."""
    tensor = tensor.detach()
    if tensor.is_inference():
        with torch.inference_mode(False):
            tensor = tensor.clone()
    return tensor


def _slice(parts: list[Rows], row: int, start: int, stop: int) -> Rows:
    """Rows `start:stop` of one batch row, copied."""
    found, first = [], 0
    for part in parts:
        a, b = max(start - first, 0), min(stop - first, part.length)
        if a < b:
            at = row if part.keys.shape[0] > 1 else 0
            found.append(part.map(lambda t, at=at, a=a, b=b: t[at : at + 1, :, a:b]).tensors())  # type: ignore[misc]
        first += part.length
    with torch.inference_mode(False):
        return Rows(**{name: torch.cat([_plain(table[name]) for table in found], dim=2) for name in found[0]})


@torch.no_grad()
def state_of(cache: KVCache, row: int) -> State | None:
    """What the layers that cannot be cut hold now, of one batch row; None where there are none."""
    found: dict[int, Any] = {}
    for index in others(cache):
        layer = cache.layers[index]
        if isinstance(layer, KVLayer) and layer._batch == 1 and not layer.is_sliding:
            layer.seal()  # what is sealed is shared with the copy
        with torch.inference_mode(False):
            twin = copy.deepcopy(layer)
        if isinstance(twin, KVLayer):
            twin.state()  # a step that waits for a rollback is applied
        if (batch_of(twin) or 1) > 1:
            _pick(twin, torch.tensor([row]))
        if isinstance(twin, KVLayer):
            _seal(twin)
            if isinstance(twin.segments, PackedChain) and len(twin.segments.sealed) > MOST_PARTS:
                twin.segments = PackedChain.of(twin.segments.flat())
        if getattr(twin, "record_past", False):
            twin.crop(0)  # layers of transformers' own then forget what only a rollback would need
            twin.record_past = False
        found[index] = twin
    return State(found) if found else None


def _seal(layer: KVLayer) -> None:
    if not layer.is_sliding:
        layer.seal()


def _pick(layer: Any, index: torch.Tensor) -> None:
    """Make these rows the batch of a layer. All kinds have `reorder_cache`; the other operations some lack."""
    if not isinstance(layer, KVLayer):
        tensor = next((t for t in tensors_of(layer) if t.ndim > 1), None)
        index = index if tensor is None else index.to(tensor.device)
    layer.reorder_cache(index)


def free(cache: KVCache) -> None:
    """Let what one batch row holds stand for as many rows as come next, where a layer can."""
    for layer in cache.kv_layers:
        if type(layer) is KVLayer and layer._batch == 1:
            _seal(layer)
            layer.free_batch()


def spread(cache: KVCache, repeats: int) -> None:
    """Repeat each batch row in layers that do not take the batch as it comes."""
    for layer in cache.layers:
        batch = batch_of(layer)
        if type(layer) is not KVLayer and batch is not None and repeats > 1:
            _pick(layer, torch.arange(batch).repeat_interleave(repeats))


def batch_of(layer: Any) -> int | None:
    """Batch size of a layer, or None while it is empty."""
    if isinstance(layer, KVLayer):
        return layer._batch if layer._batch > 0 else None
    for name in ("keys", "values"):
        tensor = vars(layer).get(name)
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
            return tensor.shape[0]
    for table in ("conv_states", "recurrent_states"):
        for tensor in (vars(layer).get(table) or {}).values():
            if isinstance(tensor, torch.Tensor):
                return tensor.shape[0]
    return None


@torch.no_grad()
def fill(cache: KVCache, parts: list[tuple[list[Rows], int]], state: State | None, batch: int) -> None:
    """Make an empty cache begin with these rows and states; `batch` is for layers of transformers' own."""
    for number, index in enumerate(cuttable(cache)):
        cache.layers[index].adopt([tables[number] for tables, _ in parts])
    if state is None or state.layers is None:
        return
    for index, layer in state.layers.items():
        twin = copy.deepcopy(layer)
        if type(twin) is KVLayer:
            twin.free_batch()
        elif batch > 1 and batch_of(twin) is not None:
            _pick(twin, torch.zeros(batch, dtype=torch.long))
        cache.layers[index] = twin
    for layer in cache.layers:
        if isinstance(layer, FollowerLayer):
            layer.source = cache.layers[layer.source.layer_idx]


# ---------------------------------------------------------------------- files


def rows_to_file(tables: list[Rows]) -> dict[str, torch.Tensor]:
    """Tensors of cuttable layers; positions follow from where the rows begin."""
    return {f"{n}.{name}": getattr(rows, name) for n, rows in enumerate(tables) for name in ("keys", "values")}


def rows_from_file(
    tensors: dict[str, torch.Tensor], start: int, length: int, devices: list[torch.device]
) -> list[Rows]:
    """The reverse. Raises `ValueError` for tensors that are not rows of as many layers."""
    if set(tensors) != {f"{n}.{name}" for n in range(len(devices)) for name in ("keys", "values")}:
        raise ValueError("rows of other layers")
    tables = []
    for number, device in enumerate(devices):
        keys, values = tensors[f"{number}.keys"], tensors[f"{number}.values"]
        for tensor in (keys, values):
            fits = tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[2] == length
            if not fits or tensor.shape[1] != keys.shape[1] or tensor.dtype not in storage._DTYPES:
                raise ValueError(f"rows of shape {tuple(tensor.shape)} and type {tensor.dtype}")
        positions = torch.arange(start, start + length, dtype=torch.int32, device=device)[None, None]
        tables.append(Rows(keys.to(device), values.to(device), positions))
    return tables


def state_to_file(state: State) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """JSON-able descriptions and tensors of a state. Raises `NotImplementedError` for layers without a stored form."""
    layers: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    assert state.layers is not None
    for index, layer in state.layers.items():
        described = storage._kv_state(layer) if isinstance(layer, KVLayer) else storage._native_state(layer)
        layers[str(index)] = described[0]
        tensors |= {f"{index}.{name}": tensor for name, tensor in described[1].items()}
    return layers, tensors


def state_from_file(
    layers: Any, tensors: dict[str, torch.Tensor], empty: KVCache, end: int, devices: list[torch.device]
) -> State:
    """The reverse, into the layers of an `empty` cache. Raises `ValueError` for what does not fit them."""
    if not isinstance(layers, dict) or set(layers) != {str(index) for index in others(empty)}:
        raise ValueError("states of other layers")
    found: dict[int, Any] = {}
    used = 0
    for name, described in layers.items():
        layer, prefix = empty.layers[int(name)], f"{name}."
        parts = {key[len(prefix) :]: t.to(devices[int(name)]) for key, t in tensors.items() if key.startswith(prefix)}
        used += len(parts)
        if not isinstance(described, dict) or described.get("kind") != type(layer).__name__:
            raise ValueError(f"layer {name} is of another kind")
        try:
            if isinstance(layer, KVLayer):
                storage._check_kv(layer, described, parts)
                storage._set_kv(layer, described, parts)
                _seal(layer)
            else:
                storage._check_native(described, parts)
                storage._set_native(layer, described, parts)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ValueError(f"layer {name} is malformed ({error})") from error
        length = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
        if length not in (0, end):
            raise ValueError(f"layer {name} has seen {length} tokens, not {end}")
        found[int(name)] = layer
    if used != len(tensors):
        raise ValueError("tensors of no layer")
    return State(found)
