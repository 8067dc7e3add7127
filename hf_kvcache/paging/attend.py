"""Attention of a short step over blocks: each piece of the table where it lies, merged by log-sum-exp."""

from __future__ import annotations

import torch

from ..ops.attention import Block, Extras, attend, merge
from ..segments.paged import PagedSegment
from .pieces import Piece


def reads_in_pieces(store: PagedSegment) -> bool:
    """Whether blocks are better read in pieces than as one table of rows."""
    pieces = store.pieces()
    return len(pieces) > 1 or (len(pieces) == 1 and pieces[0].fold > 1)


def over_blocks(
    store: PagedSegment,
    query: torch.Tensor,  # [B, Hq, Q, D]
    extras: Extras,
    visible: torch.Tensor | None = None,  # bool, broadcastable to [B, Hk, Q, N]
    bias: torch.Tensor | None = None,  # additive, broadcastable to [B, Hq, Q, N]
) -> torch.Tensor:
    """Output `[B, Hq, Q, Dv]`.

    Blocks that the sequences of a group share are read once: their queries are folded into the query length.
    """
    alone = extras._replace(sinks=None)
    blocks = []
    for piece in store.pieces():
        start = piece.start * store.pool.block_size
        keys, values = store.read("keys", piece), store.read("values", piece)
        stop = start + keys.shape[2]
        mask = None if visible is None else _folded(visible[..., start:stop], query, piece)
        added = None if bias is None else _folded(bias[..., start:stop], query, piece)
        block = attend(
            _folded(query, query, piece),
            keys.to(query.dtype),
            values.to(query.dtype),
            alone,
            mask,
            added,
            need_lse=True,
        )
        blocks.append(_unfolded(block, query, piece))
    return merge(blocks, extras.sinks)


def _folded(x: torch.Tensor, query: torch.Tensor, piece: Piece) -> torch.Tensor:
    """`[B, H, Q, ...]` (or of one batch row, one query) as `[groups, H, fold * Q, ...]`."""
    if piece.fold == 1 or (x.shape[0] == 1 and x.shape[2] == 1):
        return x
    batch, new = query.shape[0], query.shape[2]
    heads, rest = x.shape[1], x.shape[3:]
    x = x.expand(batch, heads, new, *rest).view(-1, piece.fold, heads, new, *rest)
    return x.transpose(1, 2).reshape(-1, heads, piece.fold * new, *rest)


def _unfolded(block: Block, query: torch.Tensor, piece: Piece) -> Block:
    """The reverse, of output and log-sum-exp."""
    if piece.fold == 1:
        return block

    def undo(x: torch.Tensor) -> torch.Tensor:
        heads, rest = x.shape[1], x.shape[3:]
        x = x.view(-1, heads, piece.fold, query.shape[2], *rest)
        return x.transpose(1, 2).reshape(-1, heads, query.shape[2], *rest)

    assert block.lse is not None
    return Block(undo(block.output), undo(block.lse), None)
