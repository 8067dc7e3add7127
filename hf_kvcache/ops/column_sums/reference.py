"""Column sums of an attention matrix, in memory linear in the number of rows.

`column_sums` adds up, for every row, the attention that a block of queries pays to it. Queries are taken in pieces, so
the full matrix never exists: the largest temporary is `piece * rows` per head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..attention.reference import Extras, masked_logits, probabilities

# Elements of one temporary piece of the attention matrix, over all heads (16 MiB in float32).
PIECE_ELEMENTS = 1 << 22


def column_sums(
    query: torch.Tensor,  # [B, Hq, Q, D]
    keys: torch.Tensor,  # [B, Hk, S, D]
    extras: Extras,
    visible: Callable[[int, int], torch.Tensor | None],  # (start, stop) of queries -> bool [B, Hk|1, stop-start, S]
    bias: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
    real: torch.Tensor | None = None,  # bool [B, Q]: queries that count (False for padding)
    reduce: str = "mean",
    front: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over queries of softmaxed attention, reduced over each group of query heads: float32 `[B, Hk, S]`.

    `reduce` is `"mean"` or `"max"` over the query heads of a group (the maximum is taken per query).
    """
    b, hq, q_len, _ = query.shape
    hk, s = keys.shape[1], keys.shape[2]
    total = torch.zeros(b, hk, s, dtype=torch.float32, device=query.device)
    piece = max(1, PIECE_ELEMENTS // max(1, b * hq * s))
    for start in range(0, q_len, piece):
        stop = min(start + piece, q_len)
        logits = masked_logits(query[:, :, start:stop], keys, extras, visible(start, stop), bias(start, stop), front)
        probs = probabilities(logits, extras)  # [B, Hk, G, q, S]
        grouped = probs.amax(dim=2) if reduce == "max" else probs.mean(dim=2)
        if real is not None:
            grouped = grouped * real[:, None, start:stop, None]
        total += grouped.sum(dim=2)
    return total
