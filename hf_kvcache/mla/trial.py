"""How far a layer's output is off with given factors, on activations that pass by. Nothing is kept of them."""

from __future__ import annotations

from typing import Any

import torch

from .factor import Factors
from .host import Host, rotate, visible
from .module import turn

_ROWS = 256  # queries that are tried, spread over the window


class Trial:
    """One layer's queries, keys, values and exact output for one row of tokens `[1, T, hidden]`."""

    def __init__(self, host: Host, hidden: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.host = host
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        q, k, v = (x[0].to(wide) for x in host.read(hidden[:1]))
        self.table = tuple(x[0, :, : host.rotary_dim // 2].to(wide) for x in table)
        length = hidden.shape[1]
        step = -(-length // _ROWS)
        self.rows = torch.arange(length - 1, -1, -step, device=hidden.device).flip(0)
        self.mask = visible(length, length, 0, host.extras, hidden.device)[self.rows]
        self.query = q[self.rows].transpose(0, 1)  # [H, Q, D]
        self.flat = torch.cat([k.flatten(1), v.flatten(1)], dim=-1)
        self.weight = host.module.o_proj.weight.to(wide)
        cos, sin = (x[0].to(wide) for x in table)
        group = host.heads // host.kv_heads
        turned = rotate(q[self.rows], cos[self.rows], sin[self.rows]).transpose(0, 1)
        keys = rotate(k, cos, sin).repeat_interleave(group, dim=1).permute(1, 2, 0)
        self.exact = self._finish(torch.matmul(turned, keys), v.repeat_interleave(group, dim=1).transpose(0, 1))

    def output(self, factors: Factors) -> torch.Tensor:
        """`[Q, hidden]` by the factors."""
        to: dict[str, Any] = {"device": self.flat.device, "dtype": self.flat.dtype}
        n, index = self.host.width, factors.frequencies.to(self.flat.device)
        cos, sin = (x[:, index] for x in self.table)
        rope = turn(self.flat[:, :n] @ factors.rope_key.to(**to).t(), cos, sin)
        latent = self.flat @ factors.encode.to(**to).t()
        rope_query = torch.matmul(self.query, factors.rope_query.to(**to).transpose(1, 2))
        rope_query = turn(rope_query, cos[self.rows], sin[self.rows])
        absorbed = torch.matmul(self.query, (factors.nope_query.transpose(1, 2) @ factors.keys).to(**to))
        logits = torch.matmul(rope_query, rope.t()) + torch.matmul(absorbed, latent.t())
        values = torch.matmul(latent, factors.values.to(**to).transpose(1, 2))
        if factors.offset is not None:
            values = values + factors.offset.to(**to)[:, None]
        return self._finish(logits, values)

    def error(self, factors: Factors) -> float:
        """Square of the output's error over the output's square."""
        return float((self.output(factors) - self.exact).square().sum() / self.exact.square().sum().clamp(min=1e-30))

    def latent_rms(self, factors: Factors) -> float:
        latent = self.flat @ factors.encode.to(device=self.flat.device, dtype=self.flat.dtype).t()
        return float(latent.square().mean().sqrt())

    def _finish(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        logits = logits * self.host.scaling
        softcap = self.host.extras.get("softcap")
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        weights = logits.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return torch.matmul(weights, values).transpose(0, 1).flatten(1) @ self.weight.t()
