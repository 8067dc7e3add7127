"""What offloading goes with, and the formula of its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
