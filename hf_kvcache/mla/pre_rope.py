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

from .host import Host, rotate

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
    """Stands for the cache in one step of the host's attention: takes rotated keys and values, stores what they are of."""

    def __init__(self, module: Any, cache: Any, hidden: torch.Tensor, mask: Any, positions: Any) -> None:
        self.module, self.cache, self.hidden, self.mask, self.positions = module, cache, hidden, mask, positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.hidden.shape[-1] // 2
        rows = self.hidden[:, None]
        first, second = self.cache.update(rows[..., :half], rows[..., half:], layer_idx, *args, **kwargs)
        new, held = key_states.shape[2], first.shape[2]
        if new == held:
            return key_states, value_states  # nothing before them
        rows = torch.cat([first, second], dim=-1)[:, 0].to(self.hidden.dtype)
        where = positions_of(self.mask, self.positions, rows.shape[0], new, held, rows.device, self.module)
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


def positions_of(
    mask: Any, positions: Any, batch: int, new: int, held: int, device: torch.device, module: Any
) -> torch.Tensor:
    """Positions `[B, held]` of the rows of a cache, of which `new` ones are the step's own.

    Args:
        mask: `[B, 1, new, held]` of booleans or numbers, `[B, held]` of zeros and ones, or None if all is seen.
        positions: `[B, new]` or `[1, new]` of the new tokens.

    Raises `ValueError` for positions that do not follow from the mask.
    """
    if not isinstance(positions, torch.Tensor):
        raise ValueError(
            f"{type(module).__name__} was not given `position_ids`, without which the pre-RoPE form cannot rotate the "
            "keys that it makes"
        )
    positions = positions.to(device).expand(batch, new)
    index = torch.arange(held, device=device)
    own = torch.arange(held - new, held, device=device).expand(batch, new)  # the rows of the new tokens
    real = torch.ones(batch, held, dtype=torch.bool, device=device)
    if isinstance(mask, torch.Tensor):
        seen = mask.to(device) if mask.dtype == torch.bool else mask.to(device) > -1e4 if mask.ndim == 4 else mask > 0
        if seen.ndim == 4:
            seen = seen[:, 0, :, :held].expand(batch, new, held)
            real = seen.any(1)
            # Buffers of a fixed length have room behind the new tokens. (A token of padding sees nothing.)
            own = torch.where(seen.any(-1), (seen * (index + 1)).argmax(-1), own)
        else:
            real = seen[:, :held].to(device).expand(batch, held)
    elif mask is not None:
        raise ValueError(
            f"the pre-RoPE form cannot read a mask that is a {type(mask).__name__}: use another attention "
            "implementation ('sdpa' or 'eager')"
        )
    counted = real.cumsum(1)  # [B, held]
    theirs = counted.gather(1, own)
    known = real.gather(1, own)
    by_mask, by_row = positions - theirs, positions - own
    # The newest token of each row that is no padding.
    at = (known * (torch.arange(new, device=device) + 1)).argmax(1, keepdim=True)
    offset = by_mask.gather(1, at)
    # Rows without padding between them are as far apart as they lie. With an offset from elsewhere the mask decides.
    if bool(((by_mask == offset) | ~known).all()) and (_windowed(module) or bool(((offset == -1) | ~known.any(1, True)).all())):
        return (counted + offset).clamp(min=0)
    offset = by_row.gather(1, at)
    if bool(((by_row == offset) | ~known).all()) and (_windowed(module) or bool((offset == 0).all())):
        return (index + offset).clamp(min=0)
    raise ValueError(
        "`position_ids` follow neither the attention mask (as `generate` makes them) nor the number of tokens in the "
        "cache, so the pre-RoPE form does not know the positions of its cached rows: leave `position_ids` out, or "
        "convert with form='latent'"
    )


def _windowed(module: Any) -> bool:
    """Whether the cache may hold the newest rows only, so that positions do not begin with the first of them."""
    return getattr(module, "sliding_window", None) is not None


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

    rotaries = [module for module in model.modules() if any(n.endswith("inv_freq") for n, _ in module.named_buffers(recurse=False))]
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


@memoized
def pre_rope_class(host: Any) -> type[PreRopeAttention]:
    """`PreRopeAttention` for one host."""
    return type(f"PreRope{host.__name__}", (PreRopeAttention, host), {"__module__": __name__, "host": host})


def make_pre_rope(module: Any, rotary: nn.Module, extra: tuple[Any, ...]) -> None:
    """Make a host's module one that caches its input, in place."""
    module.__class__ = pre_rope_class(type(module))
    # In a list: no submodule of this one, and still the copy's own after `copy.deepcopy`.
    module.rotary = [rotary, extra]
