"""What offloading goes with, and the formula of its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..segments.dense import capacity_for
from .config import Offload

if TYPE_CHECKING:
    from ..layer import KVLayer
    from ..policies.base import Policy


def check_offload(
    offload: Offload, policy: Policy, codec: Any, full: list[int], layers: int, ours: bool, technique: str
) -> None:
    """Raise `NotImplementedError` for combinations that do not work. `ours`: attention goes through this library."""
    if not full:
        raise NotImplementedError(f"{technique}: offload would change nothing: this model has no full-attention layer.")
    of_layer = policy.for_layer(full[0], layers, None)
    name = type(policy).__name__
    if of_layer.ragged:
        raise NotImplementedError(
            f"{technique}: `adaptive_heads` gives each head a length of its own, and pages hold all heads alike. Leave "
            "one of them out."
        )
    if of_layer.overwrites or of_layer.uses_scores or of_layer.fifo_window is not None:
        raise NotImplementedError(
            f"{technique}: {name} changes which rows are held at every step, and pages that have left the device are "
            "never rewritten. Its budget bounds the bytes already; leave `offload` None, or use SnapKV without "
            "`decode_budget`, which selects from prompts only."
        )
    if offload.top_pages is not None and codec is not None:
        raise NotImplementedError(f"{technique}: `top_pages` reads single pages, and a codec's pages are read whole")
    if offload.top_pages is not None and policy.drops:
        raise NotImplementedError(f"{technique}: `top_pages` chooses among all tokens; leave {name} out")
    for argument, chosen in (("top_pages", offload.top_pages is not None), ("attend", offload.attend == "compute")):
        if chosen and not ours:
            raise NotImplementedError(
                f"{technique}: `{argument}={getattr(offload, argument)!r}` needs a model whose attention goes through "
                "this library: pass the model itself, and one with transformers' attention interface that stores the "
                "keys it attends to. This one reads whole keys, so its pages have to be fetched."
            )


def offloaded_bytes(
    layer: KVLayer, heads: int, key_dim: int, value_dim: int, batch: int, tokens: int, dtype: torch.dtype
) -> int:
    """`expected_bytes` of one layer without a codec, in all tiers, after one prompt."""
    offload = layer.segments.offloader.config  # type: ignore[union-attr]
    policy = layer.policy
    kept = policy.kept_after(tokens)
    pages = offload.pages_of(kept)
    exact = heads * (key_dim + value_dim) * dtype.itemsize
    position = 4 * (heads if policy.per_head_positions and kept < tokens else 1)
    if pages:
        rows = kept - pages * offload.page + max(offload.page, policy.reserve if kept < tokens else 0)
    else:
        rows = capacity_for(tokens) if kept == tokens else kept + policy.reserve
    away = pages * offload.page
    total = rows * (exact + position) + away * (exact + position)
    if offload.top_pages is not None:
        total += pages * heads * key_dim * 2 * dtype.itemsize
    return batch * (total + policy.state_bytes)


class Away(NamedTuple):
    """Bytes of an offloaded cache that are not on the compute device, and of the buffers there that they come to."""

    moved: int
    staging: int


def away_bytes(
    cache: Any, shapes: Mapping[int, tuple[int, int, int]], batch: int, tokens: int, dtype: torch.dtype
) -> Away:
    """Of `expected_bytes`, what has left the device after one prompt of `tokens`, by layers' row `shapes`.

    Staging is that of `attend="fetch"`: two layers' rows, with a sixteenth to grow. There is none where attention goes
    to the rows (`attend="compute"`).
    """
    from ..cache import layer_codec
    from ..segments import OffloadedPackedStore, OffloadedStore
    from ..segments.offloaded import SPARE
    from ..segments.side import half_for, tiles_for

    moved = largest = 0
    for layer in cache.kv_layers:
        heads, key_dim, value_dim = shapes[layer.layer_idx]
        kept = layer.policy.kept_after(tokens)
        exact = heads * (key_dim + value_dim) * dtype.itemsize
        if isinstance(layer.segments, OffloadedPackedStore):
            codec = layer_codec(cache.codec, layer.policy, layer.layer_idx, len(cache.layers), key_dim, value_dim)
            packed, half = codec.packed_after(kept), half_for(torch.device("cpu"))
            held = codec.packed_bytes(batch, heads, key_dim, value_dim, tiles_for(packed, half), half) if packed else 0
            held -= batch * heads * key_dim * 2 if packed and codec.centre_keys else 0  # the mean stays
            staged = held
        elif isinstance(layer.segments, OffloadedStore):
            held = batch * cache.offload.pages_of(kept) * cache.offload.page * exact
            staged = batch * (kept + SPARE) * exact if held else 0
        else:
            continue
        moved += held
        largest = max(largest, staged)
    layers = sum(isinstance(layer.segments, OffloadedPackedStore | OffloadedStore) for layer in cache.kv_layers)
    fetched = cache.offload.attend != "compute"
    return Away(moved, min(2, layers) * (largest + largest // 16) if fetched else 0)
