"""Attention over rows that have left the device: on the CPU where they lie, or to the pages that can matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops.attention import Block, Extras, attend, merge

if TYPE_CHECKING:
    from ..segments.offloaded import OffloadedStore

CPU = torch.device("cpu")
RADIUS = 0.5  # measured: tests/bench/top_pages.py


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


def over_chosen(
    store: OffloadedStore,
    query: torch.Tensor,
    pages: torch.Tensor,
    tail: list[torch.Tensor],
    extras: Extras,
    masks: list[torch.Tensor | None],
) -> Block:
    """One query over chosen pages on the CPU and `tail` (keys, values) on its device, merged."""
    alone, cut, device = extras._replace(sinks=None), pages.shape[2] * store.page, query.device
    near = _block(query, tail[0], tail[1], alone, *(None if mask is None else mask[..., cut:] for mask in masks))
    asked, seen, added = on_cpu(query, *(_cut(mask, 0, cut) for mask in masks))
    assert asked is not None
    far = _block(asked, *store.gather(pages, CPU), alone, seen, added)
    assert far.lse is not None
    far = Block(far.output.to(device), far.lse.to(device), None)
    return Block(merge([far, near], extras.sinks), None, None)


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


def page_scores(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scaling: float) -> torch.Tensor:
    """How much each page can matter to a query `[B, Hq, 1, D]`, per KV head: `[B, H, pages]`, -inf for padding.

    Quest bounds the product of the query and any key between `low` and `high` from above: q @ middle + |q| @ radius. No
    key of a page reaches that bound in all channels at once, and RADIUS of the way to it ranks pages better. A group's
    queries vote with their softmax over pages, so that one with nothing to look for does not outvote the others. The
    first page is always read: attention rests on the first tokens, whatever their keys.
    """
    batch, heads, _, dim = low.shape
    q = query.reshape(batch, heads, -1, dim).float() * scaling
    low, high = low.float(), high.float()
    empty = (low > high).any(-1)[:, :, None]
    middle, radius = (low + high) / 2, (high - low) / 2
    estimate = torch.matmul(q, middle.transpose(2, 3)) + RADIUS * torch.matmul(q.abs(), radius.transpose(2, 3))
    votes = torch.softmax(estimate.masked_fill(empty, float("-inf")), dim=-1).sum(2)
    first = (~empty[:, :, 0]).int().argmax(-1, keepdim=True)  # after the padding
    return votes.scatter(2, first, float("inf")).masked_fill(empty[:, :, 0], float("-inf"))


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
