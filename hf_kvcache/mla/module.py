"""`MLAAttention`: a converted attention module, which caches one latent and one rotary key for all heads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache as memoized
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@dataclass(frozen=True)
class LayerDims:
    """Sizes of one converted layer, and what its host handed to the attention function.

    Attributes:
        kv_lora_rank: numbers of a token's latent.
        qk_rope_head_dim: numbers of its rotary key, two for each rotary component that was kept.
        num_heads: query heads.
        num_kv_heads: key and value heads before the conversion.
        head_dim: size of queries and keys before the conversion: that of keys without position now.
        q_norm, k_norm: whether queries and keys are normalized by head before they are rotated.
        q_bias, kv_bias, o_bias: which projections have a bias.
        scaling: of the logits.
        extras: other constants for the attention function (`sliding_window`, `softcap`).
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    q_norm: bool
    k_norm: bool
    q_bias: bool
    kv_bias: bool
    o_bias: bool
    scaling: float
    extras: dict[str, float | int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def elements(self) -> int:
        """Cached numbers of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def elements_before(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


class MLAAttention(nn.Module):
    """Multi-head latent attention in the place of a host's attention module. See `convert_to_mla`.

    A token is cached as a latent `[B, 1, S, R]` and a rotary key `[B, 1, S, P]`, which all query heads share, handed to
    `past_key_values.update` in this order, as DeepSeek-type models do. Every query head has `D` numbers for the part
    without position and `P` for the rotary one. Where queries or keys are normalized by head, the norms stay where they
    were, and `q_up` and `kv_a_proj_with_mqa` follow them.

    The names of the parts are those of DeepSeek-V3. `kv_b_proj` `[H * (D + D), R]` expands latents to every head's key
    without position and value; `enable_absorb` attends to the latents as they are instead.
    """

    frequencies: torch.Tensor

    def __init__(self, config: Any, layer_idx: int, dims: LayerDims) -> None:
        nn.Module.__init__(self)  # not the host's, see `attention_class`
        self.config, self.layer_idx, self.dims = config, layer_idx, dims
        self.kv_lora_rank, self.qk_rope_head_dim = dims.kv_lora_rank, dims.qk_rope_head_dim
        self.qk_nope_head_dim = self.v_head_dim = self.head_dim = dims.head_dim
        self.qk_head_dim = dims.head_dim + dims.qk_rope_head_dim
        self.num_heads, self.num_key_value_groups = dims.num_heads, 1
        self.scaling = dims.scaling
        self.attention_dropout = float(getattr(config, "attention_dropout", 0.0) or 0.0)
        self.is_causal = True
        hidden, heads, size = dims.hidden_size, dims.num_heads, dims.head_dim
        both = dims.num_kv_heads * size
        if dims.q_norm:
            self.q_proj = nn.Linear(hidden, heads * size, bias=dims.q_bias)
            self.q_norm = nn.Identity()
            self.q_up = nn.Parameter(torch.empty(heads, self.qk_head_dim, size))
        else:
            self.q_proj = nn.Linear(hidden, heads * self.qk_head_dim, bias=dims.q_bias)
        if dims.k_norm:
            self.k_proj = nn.Linear(hidden, both, bias=dims.kv_bias)
            self.v_proj = nn.Linear(hidden, both, bias=dims.kv_bias)
            self.k_norm = nn.Identity()
        inputs = 2 * both if dims.k_norm else hidden
        self.kv_a_proj_with_mqa = nn.Linear(inputs, dims.elements, bias=dims.kv_bias and not dims.k_norm)
        self.kv_b_proj = nn.Linear(dims.kv_lora_rank, heads * 2 * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=dims.o_bias)
        # Which of the host's frequencies each rotary component turns with.
        self.register_buffer("frequencies", torch.zeros(dims.qk_rope_head_dim // 2, dtype=torch.long))

    def expand_kv(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[B, H, N, D + P]` and values `[B, H, N, D]` of every head, from latents and rotary keys."""
        batch, _, rows, _ = latent.shape
        both = self.kv_b_proj(latent[:, 0]).view(batch, rows, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        keys, values = both.split(self.head_dim, dim=-1)
        return torch.cat([keys, rope.expand(-1, self.num_heads, -1, -1)], dim=-1), values

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, length = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(batch, length, self.num_heads, -1)
        if self.dims.q_norm:
            query = torch.einsum("bshd,hed->bshe", self.q_norm(query), self.q_up)
        query = query.transpose(1, 2)
        latent, rope = self._compressed(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent, rope = latent[:, None], rope[:, None]
        cos, sin = (table[..., self.frequencies][:, None] for table in position_embeddings)
        q_nope, q_rope = query.split([self.head_dim, self.qk_rope_head_dim], dim=-1)
        query = torch.cat([q_nope, turn(q_rope, cos, sin)], dim=-1)
        rope = turn(rope, cos, sin)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            latent, rope = cache.update(latent, rope, self.layer_idx)
        keys, values = self.expand_kv(latent, rope)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager_of(type(self)))
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self,
            query,
            keys,
            values,
            attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            **(kwargs | self.dims.extras),
        )
        return self.o_proj(output.reshape(batch, length, -1)), weights

    def _compressed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Latent and rotary key before it is turned, `[B, S, R + P]`."""
        if not self.dims.k_norm:
            return self.kv_a_proj_with_mqa(hidden_states)
        keys = self.k_proj(hidden_states)
        keys = self.k_norm(keys.view(*keys.shape[:-1], -1, self.head_dim)).flatten(-2)
        return self.kv_a_proj_with_mqa(torch.cat([keys, self.v_proj(hidden_states)], dim=-1))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[..., S, P]`, whose pairs are `(i, i + P/2)`; `cos` and `sin` are `[..., S, P/2]`."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)


@memoized
def attention_class(host: Any) -> type[MLAAttention]:
    """`MLAAttention` for one host, of whose attention class it is too: so what looks for that class finds it."""
    return type(f"MLA{host.__name__}", (MLAAttention, host), {"__module__": __name__, "host": host})


def _eager_of(cls: type) -> Callable[..., Any]:
    """The host's own eager attention, which knows its soft caps and sinks."""
    host: Any = getattr(cls, "host", None)
    own = None if host is None else getattr(sys.modules[host.__module__], "eager_attention_forward", None)
    return own or _eager


def _eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
