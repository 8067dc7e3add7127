"""One converted layer in float32, apart from its model: its output for some rows, its training, its way back."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from .host import visible
from .module import MLAAttention, turn

# Elements of the attention weights of one step: so many query rows at a time, and no more.
STEP_ELEMENTS = 1 << 24
_WARMUP = 5
_BETAS = (0.9, 0.99)

Example = tuple[torch.Tensor, torch.Tensor]  # what came in and what should come out, each [T, hidden]
Table = tuple[torch.Tensor, torch.Tensor]


class Student:
    """A float32 copy of a converted module, on its device.

    Norms stay as they are; every other parameter is trained.
    """

    def __init__(self, module: MLAAttention) -> None:
        self.original = module
        wide = torch.float64 if module.o_proj.weight.dtype == torch.float64 else torch.float32
        self.module: Any = copy.deepcopy(module).to(wide).eval()
        self.dtype, self.device = wide, module.o_proj.weight.device
        self.trained: dict[str, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            learns = "norm" not in name
            parameter.requires_grad_(learns)
            if learns:
                self.trained[name] = parameter

    def rows(self, length: int, wanted: int) -> int:
        """How many query rows of a window of this length are looked at together."""
        return max(1, min(length, wanted, STEP_ELEMENTS // (self.module.num_heads * length)))

    def output(self, hidden: torch.Tensor, table: Table, rows: torch.Tensor) -> torch.Tensor:
        """Output `[Q, hidden]` of these rows of a window `[T, hidden]`, as the module's own forward pass gives it."""
        m: Any = self.module
        size, heads = m.head_dim, m.num_heads
        query = m.q_proj(hidden[rows]).view(len(rows), heads, -1)
        if m.dims.q_norm:
            query = torch.einsum("shd,hed->she", m.q_norm(query), m.q_up)
        query = query.transpose(0, 1)  # [H, Q, D + P]
        latent, rope = m._compressed(hidden[None])[0].split([m.kv_lora_rank, m.qk_rope_head_dim], dim=-1)
        cos, sin = (x[:, m.frequencies] for x in table)
        nope, turned = query.split([size, m.qk_rope_head_dim], dim=-1)
        query = torch.cat([nope, turn(turned, cos[rows], sin[rows])], dim=-1) * m.scaling
        both = m.kv_b_proj(latent).view(len(hidden), heads, 2 * size).transpose(0, 1)
        keys, values = both.split(size, dim=-1)
        keys = torch.cat([keys, turn(rope, cos, sin).expand(heads, -1, -1)], dim=-1)
        logits = torch.matmul(query, keys.transpose(1, 2))
        softcap = m.dims.extras.get("softcap")
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        seen = visible(len(hidden), len(hidden), 0, m.dims.extras, hidden.device)[rows]
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        return m.o_proj(torch.matmul(weights, values).transpose(0, 1).flatten(1))

    def here(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(self.device, self.dtype) for tensor in tensors]

    @torch.no_grad()
    def error(self, examples: list[Example], tables: dict[int, Table], wanted: int) -> float:
        """Square of the output's error over the output's square, over rows spread evenly over each window."""
        off = total = 0.0
        for hidden, target in examples:
            hidden, target, *table = self.here(hidden, target, *tables[len(hidden)])
            count = self.rows(len(hidden), wanted)
            rows = torch.arange(len(hidden) - 1, -1, -(len(hidden) // count), device=self.device).flip(0)
            for part in rows.split(count):
                output = self.output(hidden, (table[0], table[1]), part)
                off += float((output - target[part]).square().sum())
                total += float(target[part].square().sum())
        return off / max(total, 1e-30)

    def train(
        self,
        examples: list[Example],
        tables: dict[int, Table],
        steps: int,
        learning_rate: float,
        wanted: int,
        generator: torch.Generator,
    ) -> None:
        """Adam on the mean square error, one window and `wanted` rows spread over it at a time.

        The rate is relative to the root mean square of each parameter, so latents (of unit mean square) and weights of
        any size move alike; it rises over the first steps and falls with a cosine to zero.
        """
        groups = []
        for parameter in self.trained.values():
            size = float(parameter.detach().square().mean().sqrt())
            groups.append({"params": [parameter], "lr": 0.0, "rate": learning_rate * (size if size > 0 else 1.0)})
        optimizer = torch.optim.Adam(groups, betas=_BETAS, eps=1e-12)
        scale = sum(float(target.float().square().mean()) for _, target in examples) / len(examples)
        order: list[int] = []
        for step in range(steps):
            factor = min(1.0, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * factor
            if not order:
                order = torch.randperm(len(examples), generator=generator).tolist()
            hidden, target = examples[order.pop()]
            hidden, target, *table = self.here(hidden, target, *tables[len(hidden)])
            stride = max(1, len(hidden) // self.rows(len(hidden), wanted))
            first = int(torch.randint(0, stride, (1,), generator=generator))
            rows = torch.arange(first, len(hidden), stride, device=self.device)
            optimizer.zero_grad()
            loss = (self.output(hidden, (table[0], table[1]), rows) - target[rows]).square().mean() / max(scale, 1e-30)
            loss.backward()
            optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The trained parameters in the dtype of the model, on the CPU."""
        dtype = self.original.o_proj.weight.dtype
        return {name: value.detach().to("cpu", dtype).contiguous() for name, value in self.trained.items()}


@torch.no_grad()
def write(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Put trained parameters into their module, in place: whoever holds views of them sees the change."""
    own = dict(module.named_parameters())
    for name, value in state.items():
        own[name].copy_(value)
