"""What pooled heads give on activations that pass by, and an `o_proj` fitted to it."""

from __future__ import annotations

from typing import Any

import torch

from ..mla.host import Host, logits_of, rotate
from .pool import Pooled, gain_of

_PIECE = 1 << 25  # elements of one piece of an attention matrix
_PULLS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # against the mean diagonal of the moments


class Attended:
    """One row of tokens `[1, T, hidden]` in one layer: what its heads hand to `o_proj`, `[T, H * D]`."""

    def __init__(self, host: Host, hidden: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.host, module = host, host.module
        self.wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.table = tuple(x[:1].to(self.wide) for x in table)
        parts = (linear(hidden[:1]).to(self.wide) for linear in (module.q_proj, module.k_proj, module.v_proj))
        query, self.key, self.value = parts
        self.query = query.unflatten(-1, (host.heads, host.head_dim))

    def exact(self) -> torch.Tensor:
        shape = (self.host.kv_heads, self.host.head_dim)
        return self._attend(self.query, self.key.unflatten(-1, shape), self.value.unflatten(-1, shape), None)

    def pooled(self, pooled: Pooled) -> torch.Tensor:
        """By the new heads, in their old order."""
        to: dict[str, Any] = {"device": self.key.device, "dtype": self.wide}
        shape = (len(pooled.groups), self.host.head_dim)
        query = torch.einsum("hde,bqhe->bqhd", pooled.query.to(**to), self.query)
        key = (self.key @ pooled.key.to(**to).flatten(0, 1).t()).unflatten(-1, shape)
        value = (self.value @ pooled.value.to(**to).flatten(0, 1).t()).unflatten(-1, shape)
        order = torch.tensor(pooled.order(self.host), device=self.key.device)
        made = self._attend(query[:, :, order], key, value, pooled.gains)
        return made.unflatten(-1, (self.host.heads, -1))[:, order.argsort()].flatten(1)

    def output(self, attended: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return attended @ weight.to(device=attended.device, dtype=self.wide).t()

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gains: torch.Tensor | None
    ) -> torch.Tensor:
        module = self.host.module
        query, key = (
            self._normed(getattr(module, name, None), x, None if gains is None else gains[i])
            for i, (name, x) in enumerate((("q_norm", query), ("k_norm", key)))
        )
        cos, sin = self.table
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        values = value.repeat_interleave(query.shape[2] // value.shape[2], dim=2).transpose(1, 2)
        length = query.shape[1]
        piece = max(1, _PIECE // (self.host.heads * length))
        parts = []
        for start in range(0, length, piece):
            part = query[:, start : start + piece]
            weights = logits_of(part, key, self.host.scaling, self.host.extras, start).softmax(-1)
            parts.append(torch.matmul(weights, values).transpose(1, 2)[0].flatten(1))
        return torch.cat(parts)

    def _normed(self, norm: Any, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        if norm is None:
            return x
        normed = norm(x.to(self.host.module.q_proj.weight.dtype)).to(self.wide)
        old = None if gain is None else gain_of(norm, self.host.head_dim)
        if gain is None or old is None:
            return normed
        return normed * (gain / old[0]).to(device=normed.device, dtype=self.wide)


class Refit:
    """Least squares for one layer's `o_proj` over the new heads, held near to the one that follows from the maps.

    Only the moments of what goes in, and of what it should have made up for, are kept.
    """

    def __init__(self, host: Host, pooled: Pooled) -> None:
        self.host, self.pooled = host, pooled
        self.weight = pooled.output_weight(host)
        self.biased = host.module.o_proj.bias is not None
        width = self.weight.shape[1] + self.biased
        self.inner = torch.zeros(width, width, dtype=torch.float64)
        self.cross = torch.zeros(width, self.weight.shape[0], dtype=torch.float64)
        self.exact = host.module.o_proj.weight.detach().double().cpu()

    @staticmethod
    def nbytes(host: Host) -> int:
        return 8 * host.heads * host.head_dim * (host.heads * host.head_dim + host.module.o_proj.weight.shape[0])

    def add(self, hidden: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
        for row in range(hidden.shape[0]):
            made, missing = self._look(
                hidden[row : row + 1], tuple(x[row : row + 1] if len(x) > 1 else x for x in table)
            )
            self.inner += (made.t() @ made).double().cpu()
            self.cross += (made.t() @ missing).double().cpu()

    def finish(self, hidden: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> Pooled:
        """With the strength of the pull that does best on this window."""
        made, missing = self._look(hidden[:1], table)
        best, chosen = float(missing.square().sum()), None
        scale = float(self.inner.diagonal().mean())
        for pull in _PULLS:
            ridge = pull * scale * torch.eye(len(self.inner), dtype=torch.float64)
            step = torch.linalg.solve(self.inner + ridge, self.cross)
            left = float((missing - made @ step.to(made)).square().sum())
            if left < best:
                best, chosen = left, step
        if chosen is None:
            return self.pooled
        width = self.weight.shape[1]
        self.pooled.out = self.weight + chosen[:width].t()
        if self.biased:
            self.pooled.out_bias = self.host.module.o_proj.bias.detach().double().cpu() + chosen[width]
        return self.pooled

    def _look(self, hidden: torch.Tensor, table: Any) -> tuple[torch.Tensor, torch.Tensor]:
        attended = Attended(self.host, hidden, table)
        made = attended.pooled(self.pooled)
        missing = attended.output(attended.exact(), self.exact) - attended.output(made, self.weight)
        if self.biased:
            made = torch.cat([made, made.new_ones(len(made), 1)], dim=1)
        return made, missing
