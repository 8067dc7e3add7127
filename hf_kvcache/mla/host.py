"""What an attention module does, read from the module: its queries, keys and values before they are rotated.

Nothing is taken from a list of models. A module is known if its attention, computed here from its projections, norms
and what it hands to the attention function, equals what it gives; `inspect_hosts` tries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

PROBE = "hf_kvcache_mla_probe"
_CONSTANTS = ("sliding_window", "softcap")
# Arguments of the attention function that say nothing about the module.
_NOT_OURS = ("s_aux", "sinks", "position_bias")


@dataclass
class Host:
    """An attention module that can be converted.

    Attributes:
        module: the module.
        name: where it is in the model.
        scaling: of the logits.
        extras: other constants that it hands to the attention function.
        table_scale: length of the rotary table's entries (YaRN lengthens them): logits grow with its square.
    """

    module: Any
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    scaling: float
    extras: dict[str, float | int]
    table_scale: float

    @property
    def width(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    def read(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[B, S, H, D]`, keys and values `[B, S, Hkv, D]`, normalized but not rotated."""
        module = self.module
        rows = hidden.shape[:-1]
        query = module.q_proj(hidden).view(*rows, -1, self.head_dim)
        key = module.k_proj(hidden).view(*rows, -1, self.head_dim)
        value = module.v_proj(hidden).view(*rows, -1, self.head_dim)
        if hasattr(module, "q_norm"):
            query = module.q_norm(query)
        if hasattr(module, "k_norm"):
            key = module.k_norm(key)
        return query, key, value


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`[B, S, H, D]` turned by a table `[B, S, rotary]`, pairs `(i, i + rotary/2)`, the rest left alone."""
    size = cos.shape[-1]
    c, s = cos[..., None, : size // 2], sin[..., None, : size // 2]
    real, imaginary, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
    return torch.cat([real * c - imaginary * s, imaginary * c + real * s, rest], dim=-1)


def logits_of(
    query: torch.Tensor, key: torch.Tensor, scaling: float, extras: dict[str, Any], start: int
) -> torch.Tensor:
    """Masked logits `[B, H, Q, N]` of queries `[B, Q, H, D]` at `start, start + 1, ...` over keys `[B, N, Hkv, D]`."""
    group = query.shape[2] // key.shape[2]
    keys = key.repeat_interleave(group, dim=2).permute(0, 2, 3, 1)
    logits = torch.matmul(query.transpose(1, 2), keys) * scaling
    softcap = extras.get("softcap")
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return logits.masked_fill(~visible(query.shape[1], key.shape[1], start, extras, query.device), float("-inf"))


def visible(queries: int, keys: int, start: int, extras: dict[str, Any], device: torch.device) -> torch.Tensor:
    distance = torch.arange(start, start + queries, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    window = extras.get("sliding_window")
    return seen & (distance < window) if window else seen


@contextmanager
def watch(hosts: list[Host], found: Callable[[Host, torch.Tensor, Any], None]) -> Iterator[None]:
    """Call `found(host, hidden_states, (cos, sin))` whenever one of the modules runs."""

    def hook_of(host: Host) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            table = kwargs.get("position_embeddings", args[1] if len(args) > 1 else None)
            found(host, hidden, table)

        return hook

    handles = [host.module.register_forward_pre_hook(hook_of(host), with_kwargs=True) for host in hosts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    return [
        (name, m) for name, m in model.named_modules() if all(isinstance(getattr(m, p, None), nn.Module) for p in parts)
    ]


@torch.no_grad()
def inspect_hosts(model: PreTrainedModel, partial: bool = False) -> list[Host]:
    """The attention modules of a model, each held against its own output on a few tokens.

    With `partial`, keys of which only the first channels are rotated will do too.
    Raises `NotImplementedError`, naming the module and what is unknown about it.
    """
    name = type(model).__name__
    modules = attention_modules(model)
    if not modules:
        raise NotImplementedError(
            f"{name} has no attention with q_proj, k_proj, v_proj and o_proj (fused projections and other names are "
            "not known), so it cannot be converted"
        )
    for where, module in modules:
        _check_parts(where, module)
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{name} is an encoder-decoder model: only decoders can be converted")
    seen: dict[int, dict[str, Any]] = {}
    implementation = model.config._attn_implementation

    def probe(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
        from .module import _eager

        seen.setdefault(id(module), {}).update(query=query, key=key, value=value, kwargs=kwargs)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        softcap = kwargs.get("softcap")
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        if not softcap:
            return _eager(module, query, key, value, mask, scale)
        logits = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / softcap) * softcap
        weights = torch.softmax(logits + (0 if mask is None else mask), dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value).transpose(1, 2), weights

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        entry = seen.setdefault(id(module), {})
        entry.update(output=output[0], hidden=kwargs.get("hidden_states", args[0] if args else None))
        entry["table"] = kwargs.get("position_embeddings", args[1] if len(args) > 1 else None)

    AttentionInterface.register(PROBE, probe)
    AttentionMaskInterface.register(PROBE, eager_mask)
    handles = [module.register_forward_hook(after, with_kwargs=True) for _, module in modules]
    was_training = model.training
    model.eval()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(6, device=model.device) * 37 + 5) % vocabulary
    try:
        model.config._attn_implementation_internal = PROBE
        model(input_ids=ids[None], use_cache=False)
    finally:
        model.config._attn_implementation_internal = implementation
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return [_host(name, where, module, seen.get(id(module), {}), partial) for where, module in modules]


def _check_parts(where: str, module: Any) -> None:
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear = getattr(module, part)
        if type(linear) is not nn.Linear:
            raise NotImplementedError(
                f"{where}.{part} is a {type(linear).__name__}, not a plain nn.Linear: load the model without "
                "quantization and merge its adapters (`merge_and_unload`) before converting it"
            )
        if linear.weight.is_meta:
            raise NotImplementedError(
                f"{where}.{part} is not in memory (offloaded by `device_map`): load the model where all of it fits, "
                "device_map='cpu' for example"
            )


def _host(model: str, where: str, module: Any, seen: dict[str, Any], partial: bool = False) -> Host:
    kind = f"{where} ({type(module).__name__})"

    def refuse(why: str) -> NotImplementedError:
        return NotImplementedError(f"{model}: {kind} {why}, so it cannot be converted")

    if "output" not in seen or "query" not in seen:
        raise refuse("does not use transformers' attention functions")
    table = seen["table"]
    if not (isinstance(table, tuple) and len(table) == 2):
        raise refuse("is not handed a rotary table (`position_embeddings`)")
    kwargs = seen["kwargs"]
    unknown = [key for key in _NOT_OURS if kwargs.get(key) is not None]
    if unknown:
        raise refuse(f"attends with {', '.join(unknown)}")
    if not getattr(module, "is_causal", True):
        raise refuse("is not causal")
    query, key = seen["query"], seen["key"]
    cos, sin = table
    host = Host(
        module=module,
        name=where,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=key.shape[-1],
        rotary_dim=cos.shape[-1],
        scaling=float(kwargs.get("scaling") or query.shape[-1] ** -0.5),
        extras={name: kwargs[name] for name in _CONSTANTS if kwargs.get(name) is not None},
        table_scale=float((cos.double().square() + sin.double().square()).mean().sqrt()),
    )
    if seen["value"].shape[-1] != host.head_dim:
        raise refuse("has values of another size than its keys")
    if host.rotary_dim != host.head_dim and not partial:
        raise refuse("rotates only a part of its keys")
    try:
        mine = host.read(seen["hidden"])
    except RuntimeError as error:  # a norm over all heads at once, for example
        raise refuse("makes its queries, keys or values in a way that is not known") from error
    turned = [rotate(x, cos, sin) for x in mine[:2]] + [mine[2]]
    tolerance = 1e-3 if query.dtype in (torch.float32, torch.float64) else 5e-2
    for ours, theirs in zip(turned, (query, key, seen["value"]), strict=True):
        if ours.transpose(1, 2).shape != theirs.shape or not _close(ours.transpose(1, 2), theirs, tolerance):
            raise refuse("makes its queries, keys or values in a way that is not known")
    logits = logits_of(turned[0], turned[1], host.scaling, host.extras, 0).float()
    weights = logits.softmax(-1).to(query.dtype)
    values = turned[2].repeat_interleave(host.heads // host.kv_heads, dim=2).transpose(1, 2)
    output = module.o_proj(torch.matmul(weights, values).transpose(1, 2).flatten(2))
    if not _close(output, seen["output"], tolerance):
        raise refuse("does more with its output than `o_proj`")
    return host


def _close(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return float((mine.float() - theirs.float()).abs().max()) <= tolerance * max(
        1e-6, float(theirs.float().abs().max())
    )
