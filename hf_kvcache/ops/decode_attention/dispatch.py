"""Attention of a short step over packed rows and the exact rows around them, by the fastest way this machine has."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from .. import gpu, native
from ..attention import Block, Extras, finished_logits, log_sum_exp, probabilities
from ..attention.cpu import batched_matmul
from ..packed import Format, Packed, linear_scale
from . import cpu, reference


class PackedRows(NamedTuple):
    """Packed keys and values of one layer, as attention takes them."""

    keys: Packed
    values: Packed
    key_format: Format
    value_format: Format
    length: int  # slots in use, of every batch row and head
    half: int
    key_turn: torch.Tensor | None = None  # [D, D]: packed keys are turned keys, k @ key_turn
    key_scale: torch.Tensor | None = None  # [B, H, D]: ... of keys divided by this
    key_mean: torch.Tensor | None = None  # [B, H, D]: ... after this was taken away
    value_turn: torch.Tensor | None = None  # [Dv, Dv]: packed values are turned values, v @ value_turn
    key_base: torch.Tensor | None = None  # [B, H, 1, 1]: scales are 8-bit logarithms under this (`ops.packed`)
    value_base: torch.Tensor | None = None
    steady: cpu.Steady | None = None  # what `cpu.attend` keeps from step to step

    def linear(self) -> PackedRows:
        """The same with scales that are numbers."""
        if self.key_base is None and self.value_base is None:
            return self
        sides = []
        for side, base in ((self.keys, self.key_base), (self.values, self.value_base)):
            scale = side.scale if base is None else linear_scale(side.scale[:, :, : self.length], base)
            sides.append(side._replace(scale=scale))
        return self._replace(keys=sides[0], values=sides[1], key_base=None, value_base=None)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    """Whether a training step will pass through: only the plain operations can be differentiated."""
    return torch.is_grad_enabled() and tensor.requires_grad


def packed_logits(query: torch.Tensor, keys: Packed, fmt: Format, length: int, half: int) -> torch.Tensor:
    """Products of queries `[B, H, M, D]` with the first `length` packed keys: float32 `[B, H, M, length]`."""
    if _needs_gradient(query):
        return reference.packed_logits(query, keys, fmt, length, half)
    kernels = native.active()
    if kernels is not None and kernels.supports(fmt, query.shape[-1], half, query.dtype, query.device):
        if keys.scale.dtype != torch.float16:
            keys = keys._replace(scale=keys.scale.half())
        return kernels.packed_logits(query, keys, fmt, length, half)
    use = cpu if cpu.supports(fmt, "keys", query.shape[-1], half, query.dtype, query.device) else reference
    return use.packed_logits(query, keys, fmt, length, half)


def packed_weighted(
    probs: torch.Tensor, values: Packed, fmt: Format, dim: int, half: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sums of packed values weighted by `probs` `[B, H, M, N]`: float32 `[B, H, M, dim]`. `dtype` is the model's."""
    if _needs_gradient(probs):
        return reference.packed_weighted(probs, values, fmt, dim, half)
    kernels = native.active()
    if kernels is not None and kernels.supports(fmt, dim, half, dtype, probs.device):
        if values.scale.dtype != torch.float16:
            values = values._replace(scale=values.scale.half())
        return kernels.packed_weighted(probs, values, fmt, dim, half, dtype)
    use = cpu if cpu.supports(fmt, "values", dim, half, dtype, probs.device) else reference
    return use.packed_weighted(probs, values, fmt, dim, half)


def decode_attention(
    query: torch.Tensor,  # [B, Hq, Q, D]
    front: tuple[torch.Tensor, torch.Tensor] | None,  # exact keys, values [B, Hk, F, D] before the packed rows
    packed: PackedRows | None,
    tail: tuple[torch.Tensor, torch.Tensor],  # exact keys, values after them
    extras: Extras,
    visible: torch.Tensor | None = None,  # bool, broadcastable to [B, Hk, Q, F + length + T]
    bias: torch.Tensor | None = None,  # additive, broadcastable to [B, Hq, Q, F + length + T]
    need_probs: bool = False,
    need_lse: bool = False,
) -> Block:
    """Attention over all rows in one pass: front, packed, tail. Padding, windows and holes are in `visible`."""
    if packed is not None:
        steady = packed.steady
        if steady is not None and not (need_probs or need_lse) and _is_plain(query, extras, visible, bias):
            # Dozens of small operations: without version counters and view tracking each costs a little less.
            with torch.inference_mode():
                return Block(cpu.attend(query, _in_octaves(extras.scaling), front, steady, tail, visible), None, None)
        packed = packed.linear()
    if gpu.takes(query) and not _needs_gradient(query):
        from . import triton as kernels

        if kernels.supports(query, packed, tail, extras, need_probs):
            return kernels.decode_attention(
                query, front, packed, tail, extras, visible, bias, need_probs=need_probs, need_lse=need_lse
            )
    b, hq, q_len, d = query.shape
    hk, value_dim = tail[0].shape[1], tail[1].shape[3]
    folded = query.reshape(b, hk, hq // hk * q_len, d)
    dense = [pair for pair in (front, tail) if pair is not None]
    # Scaled before they are put together: the small parts and the query are cheaper to scale than all logits.
    products = [batched_matmul(folded, keys.transpose(-1, -2)).float() * extras.scaling for keys, _ in dense]
    if packed is not None:
        products.insert(len(products) - 1, _packed_products(folded, packed, extras.scaling, query.dtype))
    products_ = torch.cat(products, dim=-1).unflatten(2, (hq // hk, q_len))
    logits = finished_logits(products_, extras._replace(scaling=1.0), visible, bias)
    lse = log_sum_exp(logits, extras) if need_lse else None
    probs = probabilities(logits, extras)
    weights = probs
    if extras.dropout > 0:
        weights = torch.nn.functional.dropout(probs, p=extras.dropout, training=True)
    flat = weights.flatten(2, 3)  # [B, Hk, G * Q, N]
    parts = list(flat.split([p.shape[-1] for p in products], dim=-1))
    output = None
    if packed is not None:
        mine = parts.pop(len(dense) - 1)
        output = packed_weighted(mine, packed.values, packed.value_format, value_dim, packed.half, query.dtype)
        if packed.value_turn is not None:
            output = torch.matmul(output, packed.value_turn.float().transpose(-1, -2))
    for part, (_, values) in zip(parts, dense, strict=True):
        product = batched_matmul(part.to(values.dtype), values).float()
        output = product if output is None else output + product
    assert output is not None
    output = output.to(query.dtype).view(b, hq, q_len, value_dim)
    return Block(output, lse, probs.flatten(1, 2) if need_probs else None)


def _packed_products(folded: torch.Tensor, packed: PackedRows, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """Scaled products of the folded queries with the packed keys, float32 `[B, Hk, M, length]`."""
    folded = folded.float() * scaling
    turned = folded
    if packed.key_scale is not None:
        turned = turned * packed.key_scale[:, :, None].float()
    if packed.key_turn is not None:
        turned = torch.matmul(turned, packed.key_turn.float())
    products = packed_logits(turned.to(dtype), packed.keys, packed.key_format, packed.length, packed.half)
    if packed.key_mean is not None:
        products += torch.matmul(folded, packed.key_mean[:, :, :, None].float())
    return products


@lru_cache(maxsize=64)
def _in_octaves(scaling: float) -> torch.Tensor:
    """The scaling of logits to base 2, as a tensor that makes what it multiplies float32."""
    return torch.tensor([scaling * math.log2(math.e)])


def _is_plain(query: torch.Tensor, extras: Extras, visible: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether a step is one for `cpu.attend`."""
    if query.dtype != torch.bfloat16 or bias is not None or _needs_gradient(query) or native.enabled():
        return False
    if extras.softcap is not None or extras.sinks is not None or extras.dropout:
        return False
    # Masks that differ by query head were made part of the bias; those of several queries are repeated for the group.
    return visible is None or query.shape[2] == 1
