"""The pre-RoPE form: what goes into the key and value projections is cached, and both are made again at each step.

Keys are rotated by their positions, so no projection of a rotated key is smaller than the key; what it was made of
before is. A layer of multi-head attention whose hidden size is that of its keys caches half as many numbers so, and
loses nothing: the weights stay what they are.
"""

from __future__ import annotations

from functools import cache as memoized
from typing import Any

import torch
from torch import nn

from ..view import KVView
from .host import Host, inspect_hosts, rotate

FORM = "pre_rope"
_GROWING = ("dynamic", "longrope")


class PreRopeAttention(nn.Module):
    """A host's attention over cached hidden states, see `convert_to_mla(form="pre_rope")`.

    A token is cached as the module's own input, `hidden` numbers in two halves `[B, 1, S, hidden / 2]`, which every
    cache takes for one KV head. At each step the rows of the past go through `k_proj`, the norm of keys if there is
    one, and `v_proj` again, keys are rotated to their positions, and the host's own code attends. Without a cache
    nothing differs from the host.

    Positions are not stored. A row's distance to the newest token is the number of tokens between them that the mask
    does not hide, as it is for `generate`, or of all, where `position_ids` count padding too. Steps whose
    `position_ids` say neither are a `ValueError`.
    """

    pre_rope = True

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in ("cache", "past_key_values") if kwargs.get(name) is not None]
        if not names:
            return super().forward(hidden_states, *args, **kwargs)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        kwargs[names[0]] = _Stored(self, kwargs[names[0]], hidden_states, mask, kwargs.get("position_ids"))
        return super().forward(hidden_states, *args, **kwargs)


class _Stored:
    """Stands for the cache in one step of the host's attention: is given keys and values, stores what they are of."""

    def __init__(self, module: Any, cache: Any, hidden: torch.Tensor, mask: Any, positions: Any) -> None:
        self.module, self.cache, self.hidden, self.mask, self.positions = module, cache, hidden, mask, positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.hidden.shape[-1] // 2
        rows = self.hidden[:, None]
        stored = self.cache.update(rows[..., :half], rows[..., half:], layer_idx, *args, **kwargs)
        # Read even where nothing comes before: caches that drop rows refuse, before anything is generated.
        first, second = (x.materialize() if isinstance(x, KVView) else x for x in stored)
        new, held = key_states.shape[2], first.shape[2]
        if new == held:
            return key_states, value_states  # nothing before them
        rows = torch.cat([first, second], dim=-1)[:, 0].to(self.hidden.dtype)
        # A window hides the oldest rows, as if they were padding, and may have dropped them.
        whole = not self.module.windowed and held >= int(self.cache.get_seq_length(layer_idx))
        where = positions_of(self.mask, self.positions, rows, new, whole)
        keys, values = keys_and_values(self.module, rows)
        cos, sin = self._table(where)
        return rotate(keys, cos, sin).transpose(1, 2), values.transpose(1, 2)

    def _table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotary, extra = self.module.rotary[0], self.module.rotary[1]
        cos, sin = rotary(self.hidden, positions, *extra)
        return cos.to(self.hidden.device), sin.to(self.hidden.device)


def keys_and_values(module: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys before rotation and values `[B, N, Hkv, D]` of cached rows `[B, N, hidden]`."""
    shape = (*rows.shape[:-1], -1, module.head_dim)
    keys, values = module.k_proj(rows).view(shape), module.v_proj(rows).view(shape)
    if hasattr(module, "k_norm"):
        keys = module.k_norm(keys)
    return keys, values


def positions_of(mask: Any, positions: Any, rows: torch.Tensor, new: int, whole: bool) -> torch.Tensor:
    """Positions `[B, held]` of the rows `[B, held, hidden]` of a cache, of which `new` ones are the step's own.

    Args:
        mask: `[B, 1, new, held]` of booleans or numbers, `[B, held]` of zeros and ones, or None if all is seen.
        positions: `[B, new]` or `[1, new]` of the new tokens.
        whole: whether the rows begin with the first token ever, and the mask hides none of them but padding.

    Raises `ValueError` for positions that do not follow from the mask.
    """
    if not isinstance(positions, torch.Tensor):
        raise ValueError(
            "the attention module was not given `position_ids`, without which the pre-RoPE form cannot rotate the keys "
            "that it makes"
        )
    batch, held, device = *rows.shape[:2], rows.device
    positions = positions.to(device).expand(batch, new)
    index = torch.arange(held, device=device)
    own = torch.arange(held - new, held, device=device).expand(batch, new)  # the rows of the new tokens
    real = torch.ones(batch, held, dtype=torch.bool, device=device)
    known = real[:, :new]  # new tokens that are no padding
    if isinstance(mask, torch.Tensor):
        seen = mask.to(device) if mask.dtype == torch.bool else mask.to(device) > -1e4 if mask.ndim == 4 else mask > 0
        if seen.ndim == 4:
            seen = seen[:, 0, :, :held].expand(batch, new, held)
            real = seen.any(1)
            # Buffers of a fixed length have room behind the new tokens. (A token of padding sees nothing.)
            known = seen.any(-1)
            own = torch.where(known, (seen * (index + 1)).argmax(-1), own)
        else:
            real = seen[:, :held].expand(batch, held)
            known = real[:, held - new :]
    elif mask is not None:
        raise ValueError(
            f"the pre-RoPE form cannot read a mask that is a {type(mask).__name__}: use another attention "
            "implementation ('sdpa' or 'eager')"
        )
    counted = real.cumsum(1)  # [B, held]
    by_mask, by_row = positions - counted.gather(1, own), positions - own
    # The newest token of each row that is no padding.
    at = (known * (torch.arange(new, device=device) + 1)).argmax(1, keepdim=True)
    for differences, numbers, first in ((by_mask, counted, -1), (by_row, index, 0)):
        offset = differences.gather(1, at)
        fits = (differences == offset) | ~known
        if whole:
            fits &= (offset == first) | ~known
        if bool(fits.all()):
            return (numbers + offset).clamp(min=0)
    raise ValueError(
        "`position_ids` follow neither the attention mask (as `generate` makes them) nor the number of tokens in the "
        "cache, so the pre-RoPE form does not know the positions of its cached rows: leave `position_ids` out, or "
        "convert with form='latent'"
    )


def check_pre_rope(model: Any, hosts: list[Host]) -> None:
    """Raises `ValueError` where the form does not pay, `NotImplementedError` where it cannot be had."""
    name = type(model).__name__
    for host in hosts:
        hidden = host.module.k_proj.in_features
        if hidden >= 2 * host.width:
            heads = f"{host.kv_heads} KV heads of {host.head_dim}"
            raise ValueError(
                f"{host.name} of {name} caches {2 * host.width} numbers a token ({heads}), and its hidden size is "
                f"{hidden}: the pre-RoPE form pays only where the hidden size is smaller (multi-head attention; "
                "grouped-query models have few KV heads already). Use form='latent'"
            )
    parameters: Any = getattr(model.config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type")} | {p.get("rope_type") for p in parameters.values() if isinstance(p, dict)}
    for kind in _GROWING:
        if kind in kinds:
            raise NotImplementedError(
                f"{name} uses rope_type={kind!r}, whose frequencies change with the length of the context: keys that "
                "are made again would be rotated otherwise than when they were new. Use form='latent'"
            )


def rotary_calls(model: nn.Module, hosts: list[Host]) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """For each host the rotary embedding that makes its table, and what it is called with besides positions.

    Raises `NotImplementedError` where it is not found, or where the host is not told positions.
    """
    calls: list[tuple[nn.Module, tuple[Any, ...], Any]] = []
    found: dict[int, tuple[nn.Module, tuple[Any, ...]]] = {}
    told: dict[int, bool] = {}

    def rotary_hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        extra = args[2:] + tuple(v for k, v in kwargs.items() if k not in ("x", "position_ids"))
        calls.append((module, extra, output))

    def host_hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        table = kwargs.get("position_embeddings", args[1] if len(args) > 1 else None)
        told[id(module)] = isinstance(kwargs.get("position_ids"), torch.Tensor)
        for rotary, extra, output in calls:
            if isinstance(output, tuple) and output[0] is table[0]:
                found[id(module)] = (rotary, extra)

    rotaries = [module for module in model.modules() if _is_rotary(module)]
    handles = [module.register_forward_hook(rotary_hook, with_kwargs=True) for module in rotaries]
    handles += [host.module.register_forward_pre_hook(host_hook, with_kwargs=True) for host in hosts]
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for host in hosts:
        if id(host.module) not in found or not told.get(id(host.module)):
            raise NotImplementedError(
                f"{host.name} of {type(model).__name__} is not told where its rotary table comes from and for which "
                "positions, so the pre-RoPE form cannot make its keys again. Use form='latent'"
            )
    return [found[id(host.module)] for host in hosts]


def _is_rotary(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


@memoized
def pre_rope_class(host: Any) -> type[PreRopeAttention]:
    """`PreRopeAttention` for one host."""
    return type(f"PreRope{host.__name__}", (PreRopeAttention, host), {"__module__": __name__, "host": host})


def make_pre_rope(module: Any, rotary: nn.Module, extra: tuple[Any, ...], windowed: bool) -> None:
    """Make a host's module one that caches its input, in place."""
    kind: Any = type(module)
    module.__class__ = pre_rope_class(kind)
    # In a list: no submodule of this one, and still the copy's own after `copy.deepcopy`.
    module.rotary = [rotary, extra]
    module.windowed = windowed


def convert_to_pre_rope(model: Any) -> list[dict[str, Any]]:
    """Change every attention module of a model in place, and return what `adopt` writes into the config about them."""
    hosts = inspect_hosts(model)
    check_pre_rope(model, hosts)
    names = {id(module): name for name, module in model.named_modules()}
    entries: list[dict[str, Any]] = []
    for host, (rotary, extra) in zip(hosts, rotary_calls(model, hosts), strict=True):
        windowed = host.extras.get("sliding_window") is not None
        make_pre_rope(host.module, rotary, extra, windowed)
        hidden = host.module.k_proj.in_features
        entries.append(
            {
                "name": host.name,
                "layer_idx": host.module.layer_idx,
                "form": FORM,
                "rotary": names[id(rotary)],
                "rotary_arguments": list(extra),
                "windowed": windowed,
                # Sizes of the two tensors that a cache is given.
                "kv_lora_rank": hidden // 2,
                "qk_rope_head_dim": hidden - hidden // 2,
                "elements_before": 2 * host.width,
            }
        )
    return entries


def install_pre_rope(model: Any, module: Any, entry: dict[str, Any]) -> None:
    """Change one module of a model that is being built, by an entry of its config. Raises `ValueError`."""
    where, extra = entry.get("rotary"), entry.get("rotary_arguments")
    rotary = dict(model.named_modules()).get(where) if isinstance(where, str) else None
    kinds = set(getattr(model.config, "layer_types", None) or ())
    known = isinstance(extra, list) and all(isinstance(kind, str) and kind in kinds for kind in extra)
    if rotary is None or not _is_rotary(rotary) or not known or type(entry.get("windowed")) is not bool:
        raise ValueError(f"an entry of `mla` in the config is not understood: {str(entry)[:200]}")
    hidden = module.k_proj.in_features
    if (entry.get("kv_lora_rank"), entry.get("qk_rope_head_dim")) != (hidden // 2, hidden - hidden // 2):
        raise ValueError(f"the sizes of {entry.get('name')} in `mla` do not fit the model")
    make_pre_rope(module, rotary, tuple(entry["rotary_arguments"]), entry["windowed"])
