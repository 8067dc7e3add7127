"""Saving and loading caches: one safetensors file, with its description in JSON.

A file comes from outside, so nothing in it is trusted: safetensors checks the layout, this module the format version,
the model's fingerprint, every name, shape and dtype, and a SHA-256 of every tensor. Only then is anything changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .layer import KVLayer
from .policies.base import Policy
from .segments import PackedStore, Rows, packed_file

if TYPE_CHECKING:
    from .cache import KVCache
    from .codecs import Codec

FORMAT_VERSION = 2
_KEY = "hf_kvcache"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SAMPLES = 8  # elements of each parameter that enter the fingerprint


def fingerprint(model: PreTrainedModel) -> str:
    """A SHA-256 over a sample of every parameter, adapters included, and the names and shapes of all of them.

    Two checkpoints of one architecture, or two precisions of one checkpoint, differ.
    """
    digest = hashlib.sha256()
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        if parameter.is_meta or not parameter.numel():
            continue  # offloaded: its bytes are elsewhere
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        samples.setdefault(flat.device, []).append(flat[::step][:_SAMPLES].float())
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)  # PEFT: which of several adapters is in use, or none
        if isinstance(active, (list, tuple)):
            digest.update(f"{name}{list(active)}{getattr(module, 'disable_adapters', None)}".encode())
    for parts in samples.values():
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.hexdigest()


def _policy_name(cache: KVCache) -> str:
    return f"{type(cache.policy).__module__}.{type(cache.policy).__qualname__}"


def save(cache: KVCache, path: str) -> None:
    """Write `cache` to `path` (whole, or not at all)."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"cannot save to {path}: the folder {folder} does not exist")
    if len({layer.get_seq_length() for layer in cache.kv_layers}) > 1:
        raise ValueError("this cache was left half-way by a forward pass that was interrupted: call `cache.reset()`")
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        state, parts = _kv_state(layer) if isinstance(layer, KVLayer) else _native_state(layer)
        layers.append(state)
        tensors.update({f"{index}.{name}": tensor.detach().contiguous().cpu() for name, tensor in parts.items()})
    description = {
        "format_version": FORMAT_VERSION,
        "technique": cache.stored_as,
        "policy": _policy_name(cache),
        "arguments": cache.arguments(),
        "codec": _described(cache.codec),
        "sharing": _described_sharing(cache),
        "scope": cache.scope,
        "signature": list(cache.config_signature),
        "fingerprint": cache.fingerprint,
        "layers": layers,
        "sha256": {name: _sha256(tensor) for name, tensor in tensors.items()},
    }
    temporary = f"{os.fspath(path)}.part{os.getpid()}"
    try:
        save_file(tensors, temporary, metadata={_KEY: json.dumps(description, default=lambda number: number.item())})
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def load(path: str, model: PreTrainedModel) -> KVCache:
    """A new cache of the kind that the file names, for `model`."""
    from . import caches
    from .cache import KVCache

    description, tensors = _read(path)
    kinds = {"KVCache": KVCache} | {name: getattr(caches, name) for name in caches.__all__}
    kind = kinds.get(description["technique"])
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"loading needs the model itself, got {type(model).__name__}: load(path, model)")
    if kind is None:
        raise ValueError(
            f"{path}: technique {description['technique']!r} is not known to this version of hf_kvcache; if it is a "
            "class of your own, make the cache and call `cache.load(path)`"
        )
    if (
        kind in (KVCache, caches.QuantizedKIVICache, caches.CrossLayerSharedCache)
        and description["policy"] != f"{Policy.__module__}.{Policy.__qualname__}"
    ):
        raise ValueError(f"{path}: written with a policy of its own; make that cache first and call `cache.load(path)`")
    try:
        parts: dict[str, Any] = {"sharing": _sharing(path, description.get("sharing"))}
        if kind is not caches.QuantizedKIVICache:
            parts["codec"] = _codec(path, description["codec"])
        cache = kind(model, **description["arguments"], **parts, scope=description["scope"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its arguments do not make a {description['technique']}: {error}") from error
    _fill(cache, path, description, tensors, layer_devices(model, len(cache.layers)))
    return cache


def _described_sharing(cache: KVCache) -> list[list[int]] | None:
    """The map of layers as files name it: pairs (follower, source), because names in JSON are text."""
    return None if cache.sharing is None else [list(pair) for pair in cache.sharing.items()]


def _sharing(path: str, described: Any) -> dict[int, int] | None:
    """The map of layers that a file names; the cache checks what is in it."""
    if described is None:
        return None
    try:
        return {follower: source for follower, source in described}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its map of shared layers is malformed ({error})") from error


def _described(codec: Codec | None) -> list[Any] | None:
    """A codec as files name it."""
    return None if codec is None else [type(codec).__name__, codec.describe()]


def _codec(path: str, described: Any) -> Codec | None:
    """The codec that a file names."""
    from . import codecs

    if described is None:
        return None
    try:
        name, arguments = described
        kind = getattr(codecs, name) if name in codecs.__all__ else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its codec is malformed ({error})") from error
    if not isinstance(kind, type) or not issubclass(kind, codecs.Codec) or kind is codecs.Codec:
        raise ValueError(f"{path}: codec {name!r} is not known to this version of hf_kvcache")
    return kind(**arguments)


def load_into(cache: KVCache, path: str) -> None:
    """Fill `cache` from the file, which must have been written by the same technique with the same arguments."""
    description, tensors = _read(path)
    mine = (cache.stored_as, _policy_name(cache), cache.arguments(), _described(cache.codec), cache.scope)
    theirs = tuple(description[name] for name in ("technique", "policy", "arguments", "codec", "scope"))
    theirs_shared, mine_shared = description.get("sharing"), _described_sharing(cache)  # older files have none
    if theirs_shared != mine_shared:
        raise ValueError(f"{path}: written by a cache with sharing={theirs_shared}, but this one has {mine_shared}")
    if mine != theirs:
        raise ValueError(f"{path}: written by {theirs}, but this cache is {mine}")
    _fill(cache, path, description, tensors, None)


def _read(path: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Description and tensors of a file, checksums verified."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise ValueError(f"{path}: a safetensors file, but not one that hf_kvcache wrote")
            description = json.loads(text)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: truncated, altered or not a safetensors file ({error})") from error
    fields = (
        "format_version",
        "technique",
        "policy",
        "arguments",
        "codec",
        "scope",
        "signature",
        "fingerprint",
        "layers",
        "sha256",
    )
    if not isinstance(description, dict) or any(field not in description for field in fields):
        raise ValueError(f"{path}: its description lacks {[f for f in fields if f not in description]}")
    if description["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {description['format_version']!r}, this version reads {FORMAT_VERSION}"
        )
    if not isinstance(description["sha256"], dict) or set(description["sha256"]) != set(tensors):
        raise ValueError(f"{path}: the tensors in the file are not those that its description lists")
    for name, tensor in tensors.items():
        if _sha256(tensor) != description["sha256"][name]:
            raise ValueError(f"{path}: tensor {name} does not match its checksum (the file was altered)")
    return description, tensors


def _fill(
    cache: KVCache,
    path: str,
    description: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    devices: list[torch.device] | None,
) -> None:
    """Check everything against `cache`, then change it."""
    if description["signature"] != list(cache.config_signature):
        raise ValueError(
            f"{path}: of another model ({description['signature']} against {list(cache.config_signature)})"
        )
    if description["fingerprint"] is None or cache.fingerprint is None:
        if description["fingerprint"] != cache.fingerprint:
            raise ValueError(
                f"{path}: a cache that was made from a config carries no fingerprint of its model's weights, so it "
                "cannot be matched with one that does. Make both from the model."
            )
    elif description["fingerprint"] != cache.fingerprint:
        raise ValueError(f"{path}: of a model of the same shape but other weights, adapters or precision")
    states = description["layers"]
    if not isinstance(states, list) or len(states) != len(cache.layers):
        raise ValueError(f"{path}: describes another number of layers")
    plans = []
    known: set[str] = set()
    for index, (layer, state) in enumerate(zip(cache.layers, states, strict=True)):
        prefix = f"{index}."
        parts = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        known.update(prefix + name for name in parts)
        if not isinstance(state, dict) or state.get("kind") != type(layer).__name__:
            raise ValueError(f"{path}: layer {index} is of another kind")
        if devices is not None:
            parts = {name: tensor.to(devices[index]) for name, tensor in parts.items()}
        try:
            if isinstance(layer, KVLayer):
                _check_kv(layer, state, parts)
            else:
                _check_native(state, parts)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{path}: layer {index} is malformed ({error})") from error
        plans.append((layer, state, parts))
    seen = {state["seen"] for layer, state, _ in plans if isinstance(layer, KVLayer)}
    if len(seen) > 1:
        raise ValueError(f"{path}: its layers have seen different numbers of tokens {sorted(seen)}")
    if known != set(tensors):
        raise ValueError(f"{path}: holds tensors of no layer: {sorted(set(tensors) - known)}")
    for layer, state, parts in plans:
        (_set_kv if isinstance(layer, KVLayer) else _set_native)(layer, state, parts)


# ---------------------------------------------------------------------- our layers


def _kv_state(layer: KVLayer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    state = {"kind": type(layer).__name__, **layer.state()}
    store = layer.segments
    if isinstance(store, PackedStore) and not store.is_empty:
        state["store"], parts = packed_file.state_of(store)
    else:
        parts = {} if store.is_empty else dict(store.rows.tensors())
    if layer.padding is not None:
        parts["padding"] = layer.padding
    more, native = _native_state(layer) if hasattr(layer, "conv_states") else ({}, {})
    return {**more, **state}, parts | native


def _check_kv(layer: KVLayer, state: dict[str, Any], parts: dict[str, torch.Tensor]) -> None:
    for name in ("seen", "last_drop"):
        if not isinstance(state[name], int) or state[name] < 0:
            raise ValueError(f"{name} is {state[name]!r}")
    if "keys" not in parts:
        if state["seen"]:
            raise ValueError("tokens were seen but no rows are stored")
        return
    keys, values, positions = parts["keys"], parts["values"], parts["positions"]
    if keys.ndim != 4 or values.ndim != 4 or positions.ndim != 3 or keys.shape[:3] != values.shape[:3]:
        raise ValueError("rows of unfitting shapes")
    if keys.dtype not in _DTYPES or values.dtype not in _DTYPES or positions.dtype != torch.int32:
        raise ValueError("rows of an unknown dtype")
    batch, heads, rows = keys.shape[:3]
    if positions.shape[0] != batch or positions.shape[1] not in (1, heads) or positions.shape[2] != rows:
        raise ValueError("positions that do not fit the rows")
    if rows > state["seen"] or (positions.numel() and (positions.max() >= state["seen"] or positions.min() < -1)):
        raise ValueError("positions beyond the tokens seen")
    packed = {name: tensor for name, tensor in parts.items() if name.startswith("packed.")}
    if isinstance(layer.segments, PackedStore):
        tail = Rows(keys, values, positions, parts.get("scores"))
        packed_file.check_state(layer.segments, state.get("store"), packed, tail, state["seen"])
    elif packed or state.get("store") is not None:
        raise ValueError("packed rows in a layer without a codec")
    if "scores" in parts and parts["scores"].shape != keys.shape[:3]:
        raise ValueError("scores that do not fit the rows")
    if "padding" in parts and parts["padding"].shape != (batch,):
        raise ValueError("padding that does not fit the batch")


def _set_kv(layer: KVLayer, state: dict[str, Any], parts: dict[str, torch.Tensor]) -> None:
    parts = dict(parts)
    padding = parts.pop("padding", None)
    names = ("keys", "values", "positions", "scores")
    table = {name: parts.pop(name) for name in names if name in parts}
    store_parts = {name: parts.pop(name) for name in list(parts) if name.startswith("packed.")}
    layer.reset()
    if hasattr(layer, "conv_states"):
        _set_native(layer, state, parts)
    if table:
        rows = Rows(**table)
        if isinstance(layer.segments, PackedStore) and state.get("store") is not None:
            packed_file.load_state(layer.segments, state["store"], store_parts, rows)
        elif state["packed"]:
            layer.segments.replace(rows, layer.policy.reserve)
        else:
            layer.segments.append(rows)
    layer.load_state(state, padding)


# ---------------------------------------------------------------------- transformers' own layers

_PLAIN = ("keys", "values", "indexer_keys", "indexer_position_ids")
_NUMBERS = ("cumulative_length", "is_initialized", "is_indexer_initialized")
_TABLES = ("conv_states", "recurrent_states")
_TABLE_NUMBERS = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
_NATIVE = {
    "DummyLayer",
    "DynamicLayer",
    "DynamicIndexedLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "HybridKVLayer",
    "FollowerLayer",
}


def _native_state(layer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    kind = type(layer).__name__
    if kind not in _NATIVE:
        raise NotImplementedError(f"layers of kind {kind} have no stored form; only the tokens can be saved")
    own = vars(layer)
    state: dict[str, Any] = {"kind": kind}
    parts: dict[str, torch.Tensor] = {}
    for name in _PLAIN:
        if isinstance(own.get(name), torch.Tensor):
            parts[name] = own[name]
    for name in _NUMBERS:
        if name in own:
            state[name] = own[name]
    for table in _TABLES:
        for key, tensor in own.get(table, {}).items():
            if tensor is not None:
                parts[f"{table}.{key}"] = tensor
    for table in _TABLE_NUMBERS:
        if table in own:
            state[table] = {str(key): value for key, value in own[table].items()}
    return state, parts


def _check_native(state: dict[str, Any], parts: dict[str, torch.Tensor]) -> None:
    allowed = set(_PLAIN)
    for name in parts:
        table, _, key = name.partition(".")
        if name not in allowed and not (table in _TABLES and key.isdigit()):
            raise ValueError(f"unknown tensor {name}")
    if not isinstance(state.get("cumulative_length", 0), int):
        raise ValueError("cumulative_length is no number")


def _set_native(layer: Any, state: dict[str, Any], parts: dict[str, torch.Tensor]) -> None:
    device = next((tensor.device for tensor in parts.values()), None)
    for name, tensor in parts.items():
        table, _, key = name.partition(".")
        if key:
            getattr(layer, table)[int(key)] = tensor
        else:
            setattr(layer, name, tensor)
    if parts and not isinstance(layer, KVLayer):
        layer.device = device
        layer.dtype = next(iter(parts.values())).dtype
    for name in _NUMBERS:
        if name in state and not isinstance(layer, KVLayer):
            setattr(layer, name, state[name])
    for table in _TABLE_NUMBERS:
        for key, value in state.get(table, {}).items():
            getattr(layer, table)[int(key)] = value
    if isinstance(getattr(layer, "_sliding_window_tensor", None), torch.Tensor) and device is not None:
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(device)


def layer_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """The device of each layer of a model, which may be spread over several."""
    found: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index not in found:
            parameter = next(module.parameters(), None)
            if parameter is not None and not parameter.is_meta:
                found[index] = parameter.device
    return [found.get(index, model.device) for index in range(layers)]


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
