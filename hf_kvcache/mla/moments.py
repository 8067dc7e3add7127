"""What a calibration pass leaves behind for each layer: second moments, never the activations themselves.

Tokens count by the attention they receive. A token that a query attends to with probability `p` moves the output by
`p (1 - p)` for each unit of its logit, so its key and value count as often as these add up over all queries: the first
token, to which most heads attend, counts a lot, and one that nobody looks at does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .host import Host, logits_of, rotate, watch

_PIECE = 1 << 25  # elements of one piece of an attention matrix


class Moments:
    """Moments of one layer, in float64 on the CPU.

    Attributes:
        gram: `[2n, 2n]` second moment of `[keys; values]` before rotation; `mean` `[2n]` their mean.
        queries: `[H, D, D]` second moments of the queries before rotation.
        distance: `[H, T]`: how much attention goes to tokens so far behind.
        attention: `[H]` sum of `p (1 - p)`, for a token of the calibration.
        phases: `[T, F]` complex: the rotation between a query and a key so far behind it.
    """

    def __init__(self, host: Host, by_attention: bool = True) -> None:
        size = 2 * host.width
        self.by_attention = by_attention
        self.gram = torch.zeros(size, size, dtype=torch.float64)
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.queries = torch.zeros(host.heads, host.head_dim, host.head_dim, dtype=torch.float64)
        self.distance = torch.zeros(host.heads, 0, dtype=torch.float64)
        self.phases = torch.zeros(0, host.rotary_dim // 2, dtype=torch.complex128)
        self.attention = torch.ones(host.heads, dtype=torch.float64)
        self.weight = 0.0
        self.tokens = 0

    @staticmethod
    def nbytes(host: Host) -> int:
        return 8 * (4 * host.width**2 + host.heads * host.head_dim**2)

    def add(self, host: Host, hidden: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count one batch `[B, T, hidden]` in."""
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        query, key, value = (x.to(wide) for x in host.read(hidden))
        cos, sin = (x.to(wide) for x in table)
        length = hidden.shape[1]
        if length > self.distance.shape[1]:
            more = torch.zeros(host.heads, length - self.distance.shape[1], dtype=torch.float64)
            self.distance = torch.cat([self.distance, more], dim=1)
            size = cos.shape[-1] // 2
            turned = torch.complex(cos[0, :, :size].double(), -sin[0, :, :size].double()).cpu()
            # Against the first token, wherever the table begins: a query is ahead of its key.
            self.phases = turned / turned[:1]
        turned_query, turned_key = rotate(query, cos, sin), rotate(key, cos, sin)
        for row in range(hidden.shape[0]):
            weight, distance = _attention(host, turned_query[row : row + 1], turned_key[row : row + 1])
            if not self.by_attention:
                weight = torch.ones_like(weight)
            rows = torch.cat([key[row].flatten(1), value[row].flatten(1)], dim=-1)
            self.gram += (rows.t() @ (weight[:, None] * rows)).double().cpu()
            self.mean += (weight @ rows).double().cpu()
            self.weight += float(weight.sum())
            self.distance[:, :length] += distance.double().cpu()
        self.queries += torch.einsum("bshd,bshe->hde", query, query).double().cpu()
        self.tokens += hidden.shape[0] * length

    def done(self) -> Moments:
        """Means instead of sums."""
        self.gram /= self.weight
        self.mean /= self.weight
        self.queries /= self.tokens
        self.attention = self.distance.sum(1) / self.tokens
        self.distance /= self.distance.sum(1, keepdim=True)
        return self


def _attention(host: Host, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each key `[T]`, and of each distance `[H, T]`."""
    length = query.shape[1]
    weight = query.new_zeros(length)
    distance = query.new_zeros(host.heads, length)
    piece = max(1, _PIECE // (host.heads * length))
    behind = torch.arange(length, device=query.device)
    for start in range(0, length, piece):
        logits = logits_of(query[:, start : start + piece], key, host.scaling, host.extras, start)
        p = logits.softmax(-1)[0]  # [H, Q, T]
        p = p * (1 - p)
        weight += p.sum((0, 1))
        index = (behind[start : start + p.shape[1], None] - behind).clamp(min=0)
        distance.scatter_add_(1, index.flatten().expand(host.heads, -1), p.flatten(1))
    return weight + 1e-9, distance


def of_weights(host: Host) -> Moments:
    """What the moments would be if hidden states were white noise: nothing but the weights is looked at."""
    moments = Moments(host)
    module = host.module
    rows = torch.cat([module.k_proj.weight, module.v_proj.weight]).detach().double().cpu()
    moments.gram = rows @ rows.t()
    query = module.q_proj.weight.detach().double().cpu().view(host.heads, host.head_dim, -1)
    moments.queries = query @ query.transpose(1, 2)
    moments.distance = torch.ones(host.heads, 1, dtype=torch.float64)
    moments.phases = torch.ones(1, host.rotary_dim // 2, dtype=torch.complex128)
    return moments


def collect(
    model: Any, hosts: list[Host], batches: Iterable[torch.Tensor], by_attention: bool = True
) -> dict[str, Moments]:
    """Run the batches of token ids `[B, T]` through the model and return each layer's moments, by the module's name."""
    moments = {host.name: Moments(host, by_attention) for host in hosts}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), watch(hosts, lambda host, hidden, table: moments[host.name].add(host, hidden, table)):
            for ids in batches:
                run(model, ids)
    finally:
        model.train(was_training)
    return {name: m.done() for name, m in moments.items()}


def run(model: Any, ids: torch.Tensor) -> None:
    """Pass token ids `[B, T]` through the layers, without logits where the model can do so."""
    base = getattr(model, model.base_model_prefix, None)
    inner: Any = base if isinstance(base, torch.nn.Module) else model
    inner(input_ids=ids.to(inner.device), use_cache=False)
