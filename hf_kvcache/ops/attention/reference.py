"""Attention over one block of rows, with everything a model may add to it, and the merge of several blocks.

Plain torch, for every device and dtype. Query heads of one group are folded into the query length, so keys and values
are read once per KV head and never repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .cpu import batched_matmul


class Extras(NamedTuple):
    """What a model asks of its attention beyond q, k, v and the mask."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq] attention-sink logits (`s_aux`)
    dropout: float = 0.0


class Block(NamedTuple):
    """Attention of all queries over one block of rows."""

    output: torch.Tensor  # [B, Hq, Q, Dv] normalised within the block
    lse: torch.Tensor | None  # [B, Hq, Q] float32 log-sum-exp of the block's logits, only where asked for
    probs: torch.Tensor | None  # [B, Hq, Q, S] float32, only where asked for


def masked_logits(
    query: torch.Tensor,  # [B, Hq, Q, D]
    keys: torch.Tensor,  # [B, Hk, S, D]
    extras: Extras,
    visible: torch.Tensor | None = None,  # bool, broadcastable to [B, Hk, Q, S]
    bias: torch.Tensor | None = None,  # additive, broadcastable to [B, Hq, Q, S]
    front: torch.Tensor | None = None,  # [B, Hk, F, D] replaces the first F keys (rotated sink tokens)
) -> torch.Tensor:
    """Logits `[B, Hk, G, Q, S]` in float32; invisible entries hold the smallest finite number."""
    b, hq, q_len, d = query.shape
    hk, s = keys.shape[1], keys.shape[2]
    group = hq // hk
    folded = query.reshape(b, hk, group * q_len, d)
    logits = batched_matmul(folded, keys.transpose(-1, -2))
    if front is not None:
        # not in place: a training step may need the first product again
        logits = torch.cat([torch.matmul(folded, front.transpose(-1, -2)), logits[..., front.shape[2] :]], dim=-1)
    return finished_logits(logits.view(b, hk, group, q_len, s), extras, visible, bias)


def finished_logits(
    products: torch.Tensor,
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Products of queries and keys `[B, Hk, G, Q, S]` as logits: scaled, capped, biased and masked."""
    hk, group = products.shape[1:3]
    logits = products.float()
    if extras.scaling != 1.0:
        logits = logits * extras.scaling
    if extras.softcap is not None:
        logits = torch.tanh(logits / extras.softcap) * extras.softcap
    if bias is not None:
        bias = bias.float()
        logits = logits + (
            bias.reshape(bias.shape[0], hk, group, *bias.shape[2:])
            if bias.shape[1] == hk * group
            else bias.unsqueeze(2)
        )
    if visible is not None:
        logits = logits.masked_fill(~visible.unsqueeze(2), torch.finfo(torch.float32).min)
    return logits


def probabilities(logits: torch.Tensor, extras: Extras) -> torch.Tensor:
    """Softmax over rows of `[B, Hk, G, Q, S]` logits, with the attention-sink logit in the denominator if any."""
    if extras.sinks is None:
        return torch.softmax(logits, dim=-1)
    _, hk, group, _, _ = logits.shape
    sink = extras.sinks.float().view(1, hk, group, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]


def log_sum_exp(logits: torch.Tensor, extras: Extras) -> torch.Tensor:
    """`[B, Hq, Q]` of `[B, Hk, G, Q, S]` logits, the attention-sink logit included."""
    lse = torch.logsumexp(logits, dim=-1)
    if extras.sinks is not None:
        lse = torch.logaddexp(lse, extras.sinks.float().view(1, *logits.shape[1:3], 1))
    return lse.flatten(1, 2)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    extras: Extras,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    front: torch.Tensor | None = None,
    need_probs: bool = False,
    need_lse: bool = False,
) -> Block:
    """Exact attention over one block of rows. Fully masked queries give finite output and a very small `lse`."""
    b, hq, q_len, _ = query.shape
    logits = masked_logits(query, keys, extras, visible, bias, front)
    lse = log_sum_exp(logits, extras) if need_lse else None
    probs = probabilities(logits, extras)
    weights = probs
    if extras.dropout > 0:
        weights = torch.nn.functional.dropout(probs, p=extras.dropout, training=True)
    flat = weights.to(values.dtype).flatten(2, 3)  # [B, Hk, G*Q, S]
    output = batched_matmul(flat, values).view(b, hq, q_len, values.shape[-1])
    return Block(output, lse, probs.flatten(1, 2) if need_probs else None)


def merge(blocks: list[Block], sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over the union of disjoint blocks, from each block's output and log-sum-exp (`[B, Hq, Q, Dv]`).

    `sinks` (`[Hq]` attention-sink logits) must then be left out of the blocks themselves: they count once.
    """
    lse = torch.stack([block.lse for block in blocks if block.lse is not None])  # [N, B, Hq, Q]
    assert len(lse) == len(blocks), "blocks to merge need their log-sum-exp"
    total = torch.logsumexp(lse, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[None, :, None])
    weight = torch.exp(lse - total).unsqueeze(-1)
    outputs = torch.stack([block.output.float() for block in blocks])
    return (weight * outputs).sum(0).to(blocks[0].output.dtype)
