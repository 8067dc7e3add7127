"""Attention over rows that have left the device: on the CPU where they lie, or to the pages that can matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops.attention import Block, Extras, attend, merge

if TYPE_CHECKING:
    from ..segments.offloaded import OffloadedStore

CPU = torch.device("cpu")


def on_cpu(query: torch.Tensor, *masks: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [query.to(CPU), *(None if mask is None else mask.to(CPU) for mask in masks)]


def where_they_lie(
    store: OffloadedStore,
    query: torch.Tensor,
    extras: Extras,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A short step `[B, Hq, Q, D]`: pages on the CPU, the tail on its device, merged. No key or value travels.

    The same partial results, in the same order, as attention over a `Chain` that is sealed at the same places.
    """
    away, device = store.away_rows, query.device
    alone = extras._replace(sinks=None)
    tail = store.tail.rows
    near = _cut(visible, away, store.length), _cut(bias, away, store.length)
    # The device's part is queued first: a GPU works on it while the CPU does the rest.
    last = [_block(query, tail.keys, tail.values, alone, *near)] if tail.length else []
    asked, seen, added = on_cpu(query, _cut(visible, 0, away), _cut(bias, 0, away))
    assert asked is not None
    blocks, start = [], 0
    for keys, values in store.pieces():
        stop = start + keys.shape[2]
        block = _block(asked, keys, values, alone, _cut(seen, start, stop), _cut(added, start, stop))
        assert block.lse is not None
        blocks.append(Block(block.output.to(device), block.lse.to(device), None))
        start = stop
    return merge([*blocks, *last], extras.sinks)


def _block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    extras: Extras,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Block:
    return attend(query, keys.to(query.dtype), values.to(query.dtype), extras, visible, bias, need_lse=True)


def _cut(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if mask is None else mask[..., start:stop]


def page_scores(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """How much each page can matter to a query `[B, Hq, 1, D]`, per KV head: `[B, H, pages]`, -inf for padding.

    The largest product of the query with any key inside the page's bounds, of the group's query that sees it most.
    """
    batch, heads, _, dim = low.shape
    q = query.reshape(batch, heads, -1, dim).float()
    low, high = low.float(), high.float()
    # sum(max(q * low, q * high)) = q @ middle + |q| @ half the width
    middle, half = (low + high) / 2, (high - low) / 2
    bound = torch.matmul(q, middle.transpose(2, 3)) + torch.matmul(q.abs(), half.transpose(2, 3))
    return bound.amax(2).masked_fill(low[..., 0] > high[..., 0], float("-inf"))


def rows_of(pages: torch.Tensor, page: int) -> torch.Tensor:
    """Row numbers `[B, H, k * page]` of pages `[B, H, k]`."""
    return (pages[..., None] * page + torch.arange(page, device=pages.device)).flatten(2)


def chosen_columns(mask: torch.Tensor | None, rows: torch.Tensor, rest: int, stop: int) -> torch.Tensor | None:
    """The columns of a mask `[B|1, H|1, 1, N]` for the chosen `rows` `[B, H, n]` and all from `rest` to `stop`.

    A mask (or bias) with a head for each query head keeps them.
    """
    if mask is None:
        return None
    batch, heads = rows.shape[0], max(mask.shape[1], rows.shape[1])
    rows = rows.repeat_interleave(heads // rows.shape[1], dim=1)
    mask = mask.expand(batch, heads, -1, -1)
    return torch.cat([mask[:, :, 0].gather(2, rows)[:, :, None], mask[..., rest:stop]], dim=-1)
