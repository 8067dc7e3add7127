"""Converted attention in the terms of DeepSeek-V3: one rotary table, a norm over the latent, a fixed scale of logits.

Three things of that format are not those of a converted model, and each is made up for exactly:

- The latent goes through an RMS norm. Latents scaled by a small `s` are far below its `eps`, so it multiplies them by
  `1 / sqrt(eps)`, whatever they are, to a relative error of `s^2 rms^2 / (2 eps)`; its weight undoes both.
- Logits are scaled by `(nope + rope)^-0.5`. What differs goes into the queries.
- All layers share one rotary table. Components are sorted into the slots of a table that has enough of each
  frequency; slots that a layer has no use for are zero.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .module import MLAAttention

EPS = 1e-6  # of the norm of the latent, in every reader of the format
_ERROR = 2.0**-24  # of the fold, for latents that are `_MARGIN` times as large as any that was seen
_MARGIN = 32.0
_SAME = 1e-6  # relative difference between frequencies that are the same but for rounding


@dataclass(frozen=True)
class Rotary:
    """The rotary table of the exported model.

    Attributes:
        slots: for each pair of the rotary key the index of its frequency in the host's table, ascending.
        parameters: `rope_parameters` of the config.
        query_scale: what goes into the rotary part of the queries, where the table cannot have it.
    """

    slots: tuple[int, ...]
    parameters: dict[str, Any]
    query_scale: float

    @property
    def size(self) -> int:
        return 2 * len(self.slots)

    def places(self, frequencies: torch.Tensor) -> list[int]:
        """The slot of each of a layer's components."""
        free: dict[int, list[int]] = {}
        for slot, index in enumerate(self.slots):
            free.setdefault(index, []).append(slot)
        return [free[index].pop(0) for index in frequencies.tolist()]

    def spread(self, rows: torch.Tensor, places: list[int]) -> torch.Tensor:
        """`[..., P', C]` rows of a layer, real parts first, at their places in `[..., P, C]`, as adjacent pairs."""
        real, imaginary = rows.chunk(2, dim=-2)
        wide = rows.new_zeros(*rows.shape[:-2], self.size, rows.shape[-1])
        index = torch.tensor(places, device=rows.device)
        wide[..., 2 * index, :] = real
        wide[..., 2 * index + 1, :] = imaginary
        return wide


def rotary_of(model: Any, modules: list[MLAAttention], target: str) -> Rotary:
    """One table for all layers. Raises `NotImplementedError` where the target has none."""
    short, long, scale = _tables(model)
    counts: Counter[int] = Counter()
    for module in modules:
        counts |= Counter(module.frequencies.tolist())
    slots = tuple(sorted(counts.elements()))
    limit = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    theta = _theta_of(short[list(slots)].double()) if short is long else None
    if theta is None and target == "vllm":
        slots = _grid(counts)
        theta = _theta_of(short[list(slots)].double()) if slots and short is long else None
        if theta is None:
            raise NotImplementedError(
                "vLLM has default RoPE only for DeepSeek-V3, each frequency once and evenly spaced ones, and this "
                f"model has {_why_not(counts, short is long)}. Convert with convert_to_mla(..., rotary='default'), or "
                "export for target='hf'"
            )
    if theta is not None:
        return Rotary(slots, {"rope_type": "default", "rope_theta": theta}, scale * scale)
    # With a base of one, the factors are the wave lengths themselves.
    original = _original_length(model) or limit
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "factor": 1.0,
        "attention_factor": scale,
        "original_max_position_embeddings": original,
        "short_factor": _inverse(short[list(slots)]),
        "long_factor": _inverse(long[list(slots)]),
    }
    return Rotary(slots, parameters, 1.0)


def _tables(model: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Frequencies `[D/2]` in float32 of short and of long contexts (one object if they are the same), and a scale."""
    rotary = getattr(model.model, "rotary_emb", None)
    parameters: Any = getattr(model.config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type")
    inv_freq = getattr(rotary, "original_inv_freq", None)
    if not isinstance(inv_freq, torch.Tensor) or not isinstance(kind, str):
        raise NotImplementedError(
            f"{type(model).__name__} has not one rotary table for all layers, as DeepSeek-V3 has, so it cannot be "
            "exported"
        )
    if kind == "dynamic":
        raise NotImplementedError(
            "rope_type='dynamic' changes its frequencies with the length of the context, for which DeepSeek-V3 with "
            "these components has no form, so this model cannot be exported"
        )
    short = inv_freq.detach().float().cpu()
    scale = float(getattr(rotary, "attention_scaling", 1.0))
    if kind != "longrope":
        return short, short, scale
    make: Any = ROPE_INIT_FUNCTIONS["longrope"]
    long, _ = make(model.config, torch.device("cpu"), seq_len=parameters["original_max_position_embeddings"] + 1)
    return short, long.float().cpu(), scale


def _original_length(model: Any) -> int | None:
    parameters: Any = model.config.rope_parameters
    return parameters["original_max_position_embeddings"] if parameters.get("rope_type") == "longrope" else None


def _theta_of(frequencies: torch.Tensor) -> float | None:
    """The base of which these are the default frequencies, if there is one."""
    count = len(frequencies)
    last = float(frequencies[-1])
    theta = 10000.0 if count == 1 else last ** (-count / (count - 1)) if last > 0 else math.inf
    if not math.isfinite(theta) or theta <= 0:
        return None
    if abs(theta / round(theta) - 1) < 1e-5 if theta > 1 else False:
        theta = float(round(theta))
    # As transformers and vLLM compute them.
    default = 1.0 / (theta ** (torch.arange(0, 2 * count, 2, dtype=torch.float) / (2 * count)))
    return theta if bool(((default.double() / frequencies - 1).abs() <= _SAME).all()) else None


def _grid(counts: Counter[int]) -> tuple[int, ...]:
    """Evenly spaced indices from 0 on that have all of these among them, or nothing if one is there twice."""
    if max(counts.values()) > 1:
        return ()
    step = math.gcd(*counts) or 1
    return tuple(range(0, max(counts) + 1, step))


def _why_not(counts: Counter[int], one: bool) -> str:
    most = max(counts.values())
    if most > 1:
        return f"one of its frequencies {most} times"
    return "a table of another kind (scaled for long contexts)" if one else "two tables"


def _inverse(frequencies: torch.Tensor) -> list[float]:
    """Factors whose inverse in float32 is as close to the frequencies as can be."""
    return [1.0 / value for value in frequencies.double().tolist()]


@dataclass(frozen=True)
class Fold:
    """How a norm is taken out of play.

    Attributes:
        scale: `s`, a power of two, for the rows before the norm.
        weight: of the norm, in the dtype of the checkpoint.
        after: what is left over for the rows that follow, near 1: that the weight is rounded.
        error: relative, at the largest root mean square that was seen.
    """

    scale: float
    weight: float
    after: float
    error: float


def fold_of(rms: float, dtype: torch.dtype) -> Fold:
    """The fold for rows whose root mean square was at most `rms`."""
    rms = rms if math.isfinite(rms) and rms > 0 else 1.0
    scale = 2.0 ** math.floor(math.log2(math.sqrt(2 * EPS * _ERROR) / (_MARGIN * rms)))
    exact = math.sqrt(float(torch.tensor(EPS, dtype=torch.float32))) / scale
    weight = float(torch.tensor(exact, dtype=torch.float64).to(dtype))
    return Fold(scale, weight, exact / weight, (scale * rms) ** 2 / (2 * EPS))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float64)


def bias_of(linear: Any) -> torch.Tensor | None:
    """The bias of a linear layer, unless there is none or it is zero."""
    bias = getattr(linear, "bias", None)
    return None if bias is None or not bool(bias.detach().any()) else bias


def attention_tensors(
    module: MLAAttention,
    rotary: Rotary,
    rank: int,
    folds: tuple[Fold, Fold | None],
    bias: bool,
    stream: float,
) -> dict[str, torch.Tensor]:
    """Weights of one attention module in float64.

    Args:
        rank: of the latent, for all layers.
        folds: of the latent's norm; of the queries', where these have a bias and so go through a projection of their
            own.
        bias: whether the format has biases.
        stream: scale of the residual stream.
    """
    dims, size = module.dims, module.head_dim
    places = rotary.places(module.frequencies)
    latent, queries = folds
    query = _wide(module.q_proj.weight)
    q_bias = bias_of(module.q_proj)
    if queries is not None:
        # One more input that is always 1 (after its norm) carries the bias.
        column = torch.zeros(query.shape[0], 1, dtype=torch.float64) if q_bias is None else _wide(q_bias)[:, None]
        query = torch.cat([query, column], dim=1) * queries.after
    query = query.view(dims.num_heads, size + module.qk_rope_head_dim, -1)
    nope, rope = query.split([size, module.qk_rope_head_dim], dim=1)
    query = torch.cat([nope, rotary.spread(rope, places) * rotary.query_scale], dim=1)
    query = query.flatten(0, 1) * (dims.scaling * math.sqrt(size + rotary.size))
    out: dict[str, torch.Tensor] = {}
    if queries is None:
        out["q_proj.weight"] = query
    else:
        hidden = dims.hidden_size
        out["q_a_proj.weight"] = torch.eye(hidden + 1, hidden, dtype=torch.float64) * queries.scale
        out["q_a_proj.bias"] = torch.zeros(hidden + 1, dtype=torch.float64)
        out["q_a_proj.bias"][-1] = queries.scale
        out["q_a_layernorm.weight"] = torch.full((hidden + 1,), queries.weight, dtype=torch.float64)
        out["q_b_proj.weight"] = query
    down: Any = module.kv_a_proj_with_mqa
    out["kv_a_proj_with_mqa.weight"] = _down(_wide(down.weight), module, rotary, places, rank, latent.scale)
    out["kv_a_layernorm.weight"] = torch.full((rank,), latent.weight, dtype=torch.float64)
    up = _wide(module.kv_b_proj.weight)
    out["kv_b_proj.weight"] = nn.functional.pad(up, (0, rank - up.shape[1])) * latent.after
    out["o_proj.weight"] = _wide(module.o_proj.weight) * stream
    if bias:
        shift = torch.zeros(down.weight.shape[0]) if down.bias is None else down.bias
        shift = _down(_wide(shift)[:, None], module, rotary, places, rank, latent.scale)
        out["kv_a_proj_with_mqa.bias"] = shift[:, 0]
        last: Any = module.o_proj.bias
        zero = torch.zeros(dims.hidden_size, dtype=torch.float64)
        out["o_proj.bias"] = zero if last is None else _wide(last) * stream
    return out


def _down(
    rows: torch.Tensor, module: MLAAttention, rotary: Rotary, places: list[int], rank: int, scale: float
) -> torch.Tensor:
    latent, rope = rows.split([module.kv_lora_rank, module.qk_rope_head_dim], dim=0)
    wide = rows.new_zeros(rank, rows.shape[1])
    wide[: latent.shape[0]] = latent * scale
    return torch.cat([wide, rotary.spread(rope, places)], dim=0)
