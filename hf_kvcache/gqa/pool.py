"""A layer's pooled heads, as maps of its old ones: the three ways to find them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..mla.host import Host
from ..mla.moments import Moments
from . import grouping
from .keys import KeyFit
from .values import ValueFit

METHODS = ("mean", "aligned", "fit")
_RIDGE = 1e-5  # of the weights' own moments, against those of the calibration: directions that it never saw


@dataclass
class Pooled:
    """The maps of one layer. `k` counts new KV heads, `n` all channels of the old ones.

    Attributes:
        groups: old KV heads of each new one.
        key, value: `[k, D, n]` old keys (before norm and rotation) and values to new ones.
        query: `[H, D, D]` each query head's queries (before their norm), heads in their old order.
        output: `[H, D, D]` the new value to what `o_proj` expects of this query head.
        gains: `[2, D]` what the norms of queries and keys multiply by, where that changes.
        kept: share of the energy of logits and of values that the new heads carry, or NaN.
        out, out_bias: an `o_proj` `[hidden, H * D]` fitted to the new heads in their old order, and its bias.
    """

    groups: list[list[int]]
    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    output: torch.Tensor
    gains: torch.Tensor | None = None
    kept: tuple[float, float] = (float("nan"), float("nan"))
    out: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None

    def order(self, host: Host) -> list[int]:
        """Old query heads in their new order."""
        size = host.heads // host.kv_heads
        return [kv * size + i for group in self.groups for kv in group for i in range(size)]

    def output_weight(self, host: Host) -> torch.Tensor:
        """`o_proj` for the new values, heads in their old order: `[hidden, H * D]`."""
        if self.out is not None:
            return self.out
        old = host.module.o_proj.weight.detach().double().cpu().view(-1, host.heads, host.head_dim)
        return torch.einsum("ohd,hde->ohe", old, self.output).flatten(1)


def candidates(host: Host, moments: Moments | None, heads: int, method: str) -> list[Pooled]:
    """Ways to hold the layer's keys and values in so many heads; where there are several, a trial must tell.

    Without moments only "mean" can be had, and nothing is known of the energy kept.
    """
    size = host.kv_heads // heads
    if moments is None:
        return [_assemble(host, grouping.contiguous(host.kv_heads, size), *_means(host, size))]
    n = host.width
    gram = moments.gram + _RIDGE * _of_weights(host, moments)
    values = ValueFit(host, gram[n:, n:])
    spread = torch.stack([(values.used[kv] * values.blocks[kv, kv]).sum() for kv in range(host.kv_heads)])
    importance = (spread.repeat_interleave(values.group) * moments.attention).clamp(min=1e-30)
    keys = KeyFit(host, moments, gram[:n, :n], importance / importance.mean())
    if method == "mean":
        groups = grouping.contiguous(host.kv_heads, size)
        maps = _means(host, size)
        return [_weighed(host, keys, values, groups, maps)]
    groups = _groups(host, keys, values, float(spread.mean()), size)
    if hasattr(host.module, "k_norm") or hasattr(host.module, "q_norm"):
        return [
            _assemble(host, groups, *_normed(host, keys, values, groups, method, signs), gains=gains)
            for signs, gains in _gains(host)
        ]
    return [_weighed(host, keys, values, groups, _maps(host, keys, values, groups, method))]


Maps = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def _means(host: Host, size: int) -> Maps:
    """Plain means (Ainslie et al.), `[k, D, D]` to the new key and value, `[h, D, D]` from them, for each group."""
    eye = torch.eye(host.head_dim, dtype=torch.float64)
    count, each = host.kv_heads // size, size * host.heads // host.kv_heads
    down, up = eye.repeat(size, 1, 1) / size, eye.repeat(each, 1, 1)
    return [down] * count, [up] * count, [down] * count, [up] * count


def _maps(host: Host, keys: KeyFit, values: ValueFit, groups: list[list[int]], method: str) -> Maps:
    share_keys, ask, share_values, back = [], [], [], []
    for members in groups:
        if method == "aligned":
            turns = keys.turns(members)
            to = keys.real(_diagonal(turns, host))
            share, query = to / len(members), to.repeat_interleave(keys.group, dim=0)
            turn = values.turns(members)
            value, output = turn / len(members), turn.transpose(1, 2)
        else:
            asked, shared = keys.fit(members, *keys.start(members))
            share, query = keys.real(shared), keys.real(asked)
            blocks = keys.real(keys.keys[members][:, members]).transpose(1, 2).reshape(len(members) * host.head_dim, -1)
            joint = share.transpose(0, 1).flatten(1)
            own = float(blocks.diagonal().mean())
            scale = (own / max(1e-300, float((joint @ blocks @ joint.t()).diagonal().mean()))) ** 0.5
            share, query = share * scale, query / scale
            value, output = values.fit(members)
        share_keys.append(share)
        ask.append(query)
        share_values.append(value)
        back.append(output.repeat_interleave(keys.group, dim=0))
    return share_keys, ask, share_values, back


def _diagonal(turns: torch.Tensor, host: Host) -> torch.Tensor:
    """Phases `[k, F]` as maps `[k, D, D]` of complex channels."""
    rest = turns.new_ones(len(turns), host.head_dim - host.rotary_dim)
    return torch.diag_embed(torch.cat([turns, turns.conj(), rest], dim=1))


def _weighed(host: Host, keys: KeyFit, values: ValueFit, groups: list[list[int]], maps: Maps) -> Pooled:
    """The maps as those of the layer, with the energy that they keep."""
    lost = [0.0, 0.0]
    for members, share, ask, value, back in zip(groups, *maps, strict=True):
        lost[0] += keys.loss(members, keys.complex(ask), keys.complex(share))
        lost[1] += values.loss(members, value, back[:: keys.group])
    energy = (sum(part.energy(members) for members in groups) for part in (keys, values))
    kept = tuple(1 - gone / max(whole, 1e-300) for gone, whole in zip(lost, energy, strict=True))
    return _assemble(host, groups, *maps, kept=kept)


def _assemble(
    host: Host,
    groups: list[list[int]],
    share_keys: list[torch.Tensor],
    ask: list[torch.Tensor],
    share_values: list[torch.Tensor],
    back: list[torch.Tensor],
    **more: Any,
) -> Pooled:
    size, each = host.head_dim, host.heads // host.kv_heads
    wide = [torch.zeros(len(groups), size, host.kv_heads, size, dtype=torch.float64) for _ in range(2)]
    narrow = [torch.zeros(host.heads, size, size, dtype=torch.float64) for _ in range(2)]
    for i, members in enumerate(groups):
        heads = [kv * each + j for kv in members for j in range(each)]
        wide[0][i][:, members] = share_keys[i].transpose(0, 1)
        wide[1][i][:, members] = share_values[i].transpose(0, 1)
        narrow[0][heads], narrow[1][heads] = ask[i], back[i]
    return Pooled(groups, wide[0].flatten(2), wide[1].flatten(2), narrow[0], narrow[1], **more)


def _groups(host: Host, keys: KeyFit, values: ValueFit, spread: float, size: int) -> list[list[int]]:
    """By what it costs to hold two heads as one, in keys (an error of a logit moves the output by as much as the values
    differ) and in values."""
    heads = host.kv_heads
    if size == heads:
        return [list(range(heads))]
    costs = torch.zeros(heads, heads, dtype=torch.float64)
    for i in range(heads):
        for j in range(i):
            logits = keys.loss([i, j], *keys.start([i, j])) * host.scaling**2 * spread
            costs[i, j] = costs[j, i] = logits + values.best_loss([i, j])
    return grouping.choose(costs, size)


# ---------------------------------------------------------------------- norms of queries and keys


def gain_of(norm: Any, size: int) -> tuple[torch.Tensor, float] | None:
    """What an RMS norm over a head multiplies by `[D]`, and how much of it is not its weight; None for other norms."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.shape != (size,):
        return None
    to: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    x = torch.linspace(-1, 2, size, dtype=torch.float64)
    made = norm(x.to(**to)[None])[0].detach().double().cpu()
    plain = x / x.square().mean().sqrt()
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 3e-2
    for offset in (0.0, 1.0):
        gain = weight.detach().double().cpu() + offset
        if float((made - gain * plain).abs().max()) <= tolerance * float(made.abs().max()):
            return gain, offset
    return None


def _gains(host: Host) -> list[tuple[bool, torch.Tensor | None]]:
    """What can be turned between a norm and the rotation: signs of pairs always; phases where the two channels of each
    pair have one gain, so with their mean in the place of both."""
    found = [gain_of(getattr(host.module, name, None), host.head_dim) for name in ("q_norm", "k_norm")]
    gains = torch.stack([torch.ones(host.head_dim, dtype=torch.float64) if pair is None else pair[0] for pair in found])
    half = host.rotary_dim // 2
    pair = gains[:, : 2 * half].view(2, 2, half)
    tied = gains.clone()
    tied[:, : 2 * half] = pair.square().mean(1).sqrt().mul(pair.mean(1).sign()).repeat(1, 2)
    if torch.allclose(tied, gains, rtol=1e-9, atol=0):
        return [(False, None)]
    return [(True, None), (False, tied)]


def _normed(host: Host, keys: KeyFit, values: ValueFit, groups: list[list[int]], method: str, signs: bool) -> Maps:
    """Keys are only as large as their norm makes them: heads are turned, brought to one size and summed before it."""
    weight = host.module.k_proj.weight.detach().double().cpu()
    if host.module.k_proj.bias is not None:
        weight = torch.cat([weight, host.module.k_proj.bias.detach().double().cpu()[:, None]], dim=1)
    size = weight.view(host.kv_heads, -1).square().mean(1).sqrt()
    share_keys, ask, share_values, back = [], [], [], []
    for members in groups:
        turns = keys.turns(members)
        if signs:
            # Of phases that are known up to one for all heads: take the one that brings them closest to signs.
            common = turns.square().sum(0).sqrt()
            turns = torch.where((turns * common.conj()).real >= 0, 1.0, -1.0).to(torch.complex128)
        to = keys.real(_diagonal(turns, host))
        scale = float(size[members].mean()) / size[members]
        share_keys.append(to * scale[:, None, None] / len(members))
        ask.append(to.repeat_interleave(keys.group, dim=0))
        if method == "aligned":
            turn = values.turns(members)
            value, output = turn / len(members), turn.transpose(1, 2)
        else:
            value, output = values.fit(members)
        share_values.append(value)
        back.append(output.repeat_interleave(keys.group, dim=0))
    return share_keys, ask, share_values, back


def _of_weights(host: Host, moments: Moments) -> torch.Tensor:
    """Moments of keys and values were hidden states white noise, as large as those of the calibration. Heads that are
    turned copies of each other are so in here too."""
    blocks = []
    for i, linear in enumerate((host.module.k_proj, host.module.v_proj)):
        rows = linear.weight.detach().double().cpu()
        if linear.bias is not None:
            rows = torch.cat([rows, linear.bias.detach().double().cpu()[:, None]], dim=1)
        own = moments.gram.diagonal()[i * host.width : (i + 1) * host.width].mean()
        block = rows @ rows.t()
        blocks.append(block * (own / block.diagonal().mean()))
    return torch.block_diag(*blocks)
