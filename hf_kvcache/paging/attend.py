"""Attention of a short step over blocks: each piece of the table is read where it lies, or once for who shares it."""

from __future__ import annotations

import torch

from ..ops.attention import Extras, finished_logits, probabilities
from ..ops.attention.cpu import batched_matmul
from ..segments.paged import PagedSegment


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
    """Output `[B, Hq, Q, Dv]`: one softmax over the products of all pieces.

    Queries of sequences that share blocks are folded into the query length, so that keys and values are read once.
    """
    batch, query_heads, new, dim = query.shape
    heads = store.shape[1]
    group = query_heads // heads
    queries = query.reshape(batch, heads, group * new, dim) * extras.scaling
    pieces, products = store.pieces(), []
    for piece in pieces:
        keys = store.read("keys", piece).to(query.dtype)
        products.append(_unfolded(batched_matmul(_folded(queries, piece.fold), keys.transpose(-1, -2)), piece.fold))
    logits = torch.cat(products, dim=-1).view(batch, heads, group, new, -1)
    probs = probabilities(finished_logits(logits, extras._replace(scaling=1.0), visible, bias), extras)
    if extras.dropout > 0:
        probs = torch.nn.functional.dropout(probs, p=extras.dropout, training=True)
    weights = probs.to(query.dtype).flatten(2, 3).split([product.shape[-1] for product in products], dim=-1)
    output: torch.Tensor | None = None
    for piece, weight in zip(pieces, weights, strict=True):
        values = store.read("values", piece).to(query.dtype)
        part = _unfolded(batched_matmul(_folded(weight, piece.fold), values), piece.fold).float()
        output = part if output is None else output + part
    assert output is not None
    return output.to(query.dtype).reshape(batch, query_heads, new, -1)


def _folded(x: torch.Tensor, fold: int) -> torch.Tensor:
    """`[B, H, M, N]` as `[B / fold, H, fold * M, N]`."""
    if fold == 1:
        return x
    _, heads, m, n = x.shape
    return x.reshape(-1, fold, heads, m, n).transpose(1, 2).reshape(-1, heads, fold * m, n)


def _unfolded(x: torch.Tensor, fold: int) -> torch.Tensor:
    """The reverse."""
    if fold == 1:
        return x
    groups, heads, m, n = x.shape
    return x.view(groups, heads, fold, m // fold, n).transpose(1, 2).reshape(groups * fold, heads, m // fold, n)
