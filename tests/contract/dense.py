"""An independent oracle: Llama in float64, every token kept, dropped ones masked out by a simulated policy.

It shares no code with the library and has no cache: keys are stored before RoPE, attention is a full matrix, a policy
is a rule that marks rows dead. One sequence at a time; padding does not exist here.
"""

from __future__ import annotations

from typing import Any

import torch

from .common import stock_of


class Layer:
    """What one layer knows: raw keys and values of every token, who is alive per KV head, and sums of attention."""

    def __init__(self, heads: int, dim: int) -> None:
        self.keys = torch.zeros(heads, 0, dim, dtype=torch.float64)
        self.values = torch.zeros(heads, 0, dim, dtype=torch.float64)
        self.alive = torch.zeros(heads, 0, dtype=torch.bool)
        self.scores = torch.zeros(heads, 0, dtype=torch.float64)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new = keys.shape[1]
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        self.alive = torch.cat([self.alive, torch.ones(len(keys), new, dtype=torch.bool)], 1)
        self.scores = torch.cat([self.scores, torch.zeros(len(keys), new, dtype=torch.float64)], 1)


class Rule:
    """Keeps everything."""

    def key_positions(self, layer: Layer, start: int) -> torch.Tensor:
        return torch.arange(layer.keys.shape[1]).expand(len(layer.keys), -1)

    def after(self, layer: Layer, index: int, probs: torch.Tensor, prompt: bool) -> None:
        """`probs [Hkv, Q, N]` is the attention of this step's queries, mean over each group."""


class Window(Rule):
    """Sinks and a window; a sink is used at the place right before the window."""

    def __init__(self, window: int, sinks: int) -> None:
        self.window, self.sinks = window, sinks

    def key_positions(self, layer: Layer, start: int) -> torch.Tensor:
        positions = super().key_positions(layer, start).clone()
        first = start - self.window  # the oldest token of the window before this step
        if first > self.sinks:
            positions[:, : self.sinks] = torch.arange(first - self.sinks, first)
        return positions

    def after(self, layer: Layer, index: int, probs: torch.Tensor, prompt: bool) -> None:
        tokens = torch.arange(layer.keys.shape[1])
        layer.alive &= (tokens < self.sinks) | (tokens >= len(tokens) - self.window)


class H2O(Rule):
    def __init__(self, heavy: float, recent: float) -> None:
        self.heavy, self.recent, self.sizes = heavy, recent, (0, 0)

    def after(self, layer: Layer, index: int, probs: torch.Tensor, prompt: bool) -> None:
        layer.scores += probs.sum(1)
        tokens = layer.keys.shape[1]
        if prompt:
            self.sizes = tuple(n if n >= 1 else max(1, int(n * tokens)) for n in (self.heavy, self.recent))
        heavy, recent = self.sizes
        for head, alive in enumerate(layer.alive):
            old = alive[: tokens - recent].nonzero().flatten()
            if len(old) > heavy:
                losers = layer.scores[head, old].argsort(descending=True)[heavy:]
                alive[old[losers]] = False


class Snap(Rule):
    def __init__(
        self,
        capacity: list[int],
        window: int,
        kernel: int,
        maximum: bool = False,
        extra: int | None = None,
        sinks: int = 0,
    ) -> None:
        self.capacity, self.window, self.kernel, self.maximum, self.extra = capacity, window, kernel, maximum, extra
        self.sinks = sinks

    def after(self, layer: Layer, index: int, probs: torch.Tensor, prompt: bool) -> None:
        tokens = layer.keys.shape[1]
        limit = self.capacity[index] if prompt else self.capacity[index] + (self.extra or 10**6)
        score = probs[:, -self.window :].sum(1)
        for head, alive in enumerate(layer.alive):
            old = alive[: tokens - self.window].nonzero().flatten()
            room = limit - self.window
            if len(old) <= room:
                continue
            value = score[head, old]
            if prompt:  # pooled over neighbours among the rows that are held
                half = self.kernel // 2
                wide = torch.cat([value.new_zeros(half), value, value.new_zeros(half)]).unfold(0, self.kernel, 1)
                value = wide.amax(-1) if self.maximum else wide.mean(-1)
            value = torch.where(old < self.sinks, torch.inf, value)
            alive[old[value.argsort(descending=True, stable=True)[room:]]] = False  # ties: the older row stays


class DenseLlama:
    """Feed token ids in blocks; each call returns the logits `[Q, V]` of the block.

    With `sharing`, a follower attends over the rows of its source, and the rule sees the attention of all readers.
    """

    def __init__(self, rule: Rule, model: Any = None, sharing: dict[int, int] | None = None) -> None:
        model = stock_of("llama") if model is None else model
        self.sharing = sharing or {}
        self.config = model.config
        self.weights: dict[str, torch.Tensor] = {k: v.double() for k, v in model.state_dict().items()}
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        self.layers = [Layer(heads, dim) for _ in range(self.config.num_hidden_layers)]
        self.rule, self.seen = rule, 0

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[name]

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        theta: Any = self.config.rope_parameters["rope_theta"]
        angle = positions[..., None].double() * theta ** (-torch.arange(half).double() / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, prompt: bool = False) -> torch.Tensor:
        w, c, new, start = self.weights, self.config, len(ids), self.seen
        x = w["model.embed_tokens.weight"][ids]
        ends: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # rows held before, attention of every reader
        for i in range(len(self.layers)):
            source = self.sharing.get(i, i)
            layer = self.layers[source]
            p = f"model.layers.{i}."
            h = self._norm(x, p + "input_layernorm.weight")
            q, k, v = (
                (h @ w[f"{p}self_attn.{n}_proj.weight"].T).view(new, -1, c.head_dim).transpose(0, 1) for n in "qkv"
            )
            if source == i:
                ends[i] = layer.alive.clone(), []  # attend, then drop: the step sees what was held when it began
                layer.append(k, v)
            held, seen = ends[source]
            total = layer.keys.shape[1]
            visible = torch.cat([held, torch.ones(len(held), new, dtype=torch.bool)], 1)[:, None]
            visible = visible & (torch.arange(total) <= torch.arange(start, total)[:, None])
            keys = self._rope(layer.keys, self.rule.key_positions(layer, start))
            q = self._rope(q, torch.arange(start, total)).view(len(held), -1, new, c.head_dim)  # [Hkv, G, Q, D]
            logits = (q @ keys[:, None].transpose(-1, -2)) * c.head_dim**-0.5
            probs = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
            out = (probs @ layer.values[:, None]).flatten(0, 1).transpose(0, 1).flatten(1)
            x = x + out @ w[p + "self_attn.o_proj.weight"].T
            h = self._norm(x, p + "post_attention_layernorm.weight")
            gate, up = (h @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
            seen.append(probs)
        for i, (_, seen) in ends.items():
            self.rule.after(self.layers[i], i, torch.cat(seen, dim=1).mean(1), prompt)
        self.seen += new
        return self._norm(x, "model.norm.weight") @ w["lm_head.weight"].T

    def positions(self, layer: int) -> list[list[int]]:
        """Alive positions of each KV head."""
        return [alive.nonzero().flatten().tolist() for alive in self.layers[layer].alive]
