"""One step of absorbed attention: over a layer's own rows, or over latents that another cache handed out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..attention import (
    PIECE_ELEMENTS,
    Sight,
    _by_kv_head,
    _causal,
    _check_extras,
    _check_model,
    is_ours,
)
from ..layer import KVLayer
from ..ops.attention import Extras
from ..ops.decode_attention import PackedRows
from ..ops.latent_attention import Part, latent_attention
from ..policies.base import Step
from ..segments import PackedStore, Ragged
from ..view import KVView
from .weights import Decoded, halves_of, runs_as_module


class Absorbed:
    """What `enable_absorb` leaves on an attention module: decides each step's side, and computes the absorbed one."""

    def __init__(self) -> None:
        self.decoded = Decoded()

    def hands_on(self, module: Any, latent: torch.Tensor, rope: torch.Tensor) -> bool:
        """Whether the attention function that follows is the one that understands latents."""
        return is_ours(module.config._attn_implementation)

    def is_latent(self, module: Any, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these are latents and rotary parts, and not keys and values that somebody expanded."""
        return key.shape[1] == 1 and (key.shape[3], value.shape[3]) == (module.kv_lora_rank, module.qk_rope_head_dim)

    def expand(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own: Any = type(module)
        return own.expand_kv(module, key, value)

    def takes(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether to attend in the latent. Training, and long steps over few rows, are cheaper (or exact) expanded."""
        linear = module.kv_b_proj
        if module.training or linear.training or runs_as_module(linear):
            return False
        if torch.is_grad_enabled():
            learns = query.requires_grad or key.requires_grad or value.requires_grad
            if learns or any(parameter.requires_grad for parameter in linear.parameters()):
                return False
        if query.shape[2] > 1:
            halves_of(
                module, self.decoded, query.dtype
            )  # raises with the prompt, and not at the first step of decoding
        if isinstance(key, KVView):
            layer = key.layer
            if layer.pending is None or not isinstance(value, KVView) or layer.pending.rows.length != query.shape[2]:
                return False
            if layer.record_past and layer.policy.needs_queries:
                return True  # a rollback can only be scored anew over rows as they are held
        elif mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 4):
            return False  # masks of flash and flex
        return is_cheaper(query.shape[2], key.shape[2], module)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        scaling: float | None,
        before: str,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output `[B, Q, H, Dv]`, and weights `[B, H, Q, N]` where the implementation before returned them."""
        halves = halves_of(module, self.decoded, query.dtype)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        extras = Extras(scale, kwargs.get("softcap"), kwargs.get("s_aux"))
        q_nope, q_rope = query.split([halves.key_size, query.shape[-1] - halves.key_size], dim=-1)
        q_latent = halves.absorb(q_nope)
        if isinstance(key, KVView):
            output, weights = _over_layer(key.layer, module, query, q_latent, q_rope, mask, extras, before, kwargs)
        else:
            sight = _Given(module, query, key.shape[2], mask, kwargs)
            output, weights = _in_pieces(q_latent, q_rope, [(key, value)], extras, sight, before == "eager")
        output = halves.release(output).transpose(1, 2).contiguous()
        return output, None if weights is None or before != "eager" else weights.to(query.dtype)


def is_cheaper(new: int, total: int, module: Any) -> bool:
    """Whether `new` queries over `total` rows take fewer products in the latent than with all rows expanded."""
    rank, rope, both = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim + module.v_head_dim
    absorbed = new * rank * both + new * total * (2 * rank + rope)
    expanded = total * rank * both + new * total * (both + rope)
    return absorbed < expanded


def _over_layer(
    layer: KVLayer,
    module: Any,
    query: torch.Tensor,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    mask: torch.Tensor | None,
    extras: Extras,
    before: str,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over the rows of a layer, and end its step."""
    _check_model(layer, module)
    _check_extras(layer, kwargs)
    new, policy, pending = query.shape[2], layer.policy, layer.pending
    assert pending is not None
    sight = Sight(layer, query, mask, kwargs)
    probs_wanted = policy.wants_probs(new, pending.held)
    want = before == "eager" or probs_wanted
    store = layer.segments
    cuts: list[int] = []
    if isinstance(store, PackedStore) and pending.written and not policy.drops:
        # A draft is checked in one step, but each of its tokens sees what it would see if they came one by one.
        draft = new > 1 and not layer.is_prompt(new) and query.shape[0] == 1 and not layer.has_empty
        cuts = store.due(new) if draft else []
    outputs, weights = [], []
    for start, stop in zip([0, *cuts], [*cuts, new], strict=True):
        parts = _parts(layer, store.as_of(new - start) if start and isinstance(store, PackedStore) else store)
        output, part_weights = _in_pieces(q_latent, q_rope, parts, extras, sight, want, start, stop)
        outputs.append(output)
        weights.append(part_weights)
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    probs = None if weights[0] is None else torch.cat([w for w in weights if w is not None], dim=2)
    if not policy.drops and not layer.is_sliding and not layer.shared:
        layer.finish_unseen()
        return output, probs
    if pending.step is not None and layer.shared:  # a later layer, with the rows of this one
        return output, probs
    step = Step(
        rows=layer.current(),
        new=new,
        start=pending.start,
        query=torch.cat([q_latent, q_rope], dim=-1).detach() if policy.needs_queries else None,
        model_keys=None,
        visible=sight.visible,
        bias=sight.bias,
        real=sight.real,
        extras=extras,
        prompt=layer.is_prompt(new),
        probs=probs.detach().float() if probs is not None and probs_wanted else None,
        horizon=layer.horizon(pending.start + new),
        padding=layer.padding,
        latent=True,
    )
    layer.finish(step)
    return output, probs


def _parts(layer: KVLayer, store: Any) -> list[Part]:
    """The rows to attend over, where they lie."""
    parts: list[Part]
    if isinstance(store, Ragged) or (layer.pending is not None and not layer.pending.written):
        rows = layer.current()
        parts = [(rows.keys, rows.values)]
    elif isinstance(store, PackedStore):
        store = store.flat()
        front, packed, tail = store.attended()
        parts = [] if front is None else [(front.keys, front.values)]
        parts += [] if packed is None else [packed.linear()]
        parts.append(tail)
    else:
        # Sealed rows of one batch row stand for all of them.
        batch = store.shape[0]
        parts = []
        for rows in layer.parts:
            parts.append((rows.keys.expand(batch, -1, -1, -1), rows.values.expand(batch, -1, -1, -1)))
    moved = layer.front()
    if moved is not None:
        which, sinks = moved
        first, n = parts[0], sinks.shape[2]
        assert which == "values" and not isinstance(first, PackedRows), "the rotary part of exact rows is what moves"
        parts[:1] = [(first[0][:, :, :n], sinks), (first[0][:, :, n:], first[1][:, :, n:])]
    return parts


def _in_pieces(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    parts: list[Part],
    extras: Extras,
    sight: Any,
    want: bool,
    start: int = 0,
    stop: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries `start:stop`, so many at a time that no temporary grows beyond a bound: `[B, H, Q, R]` and weights."""
    stop = q_latent.shape[2] if stop is None else stop
    rows = sum(part.length if isinstance(part, PackedRows) else part[0].shape[2] for part in parts)
    piece = max(1, PIECE_ELEMENTS // (q_latent.shape[0] * q_latent.shape[1] * max(1, rows)))
    blocks = []
    for a in range(start, stop, piece):
        b = min(a + piece, stop)
        visible, bias = _by_kv_head(sight.visible(a, b), sight.bias(a, b), 1)
        blocks.append(
            latent_attention(q_latent[:, :, a:b], q_rope[:, :, a:b], parts, extras, visible, bias, need_probs=want)
        )
    if len(blocks) == 1:
        return blocks[0].output, blocks[0].probs
    probs = torch.cat([block.probs for block in blocks if block.probs is not None], dim=2) if want else None
    return torch.cat([block.output for block in blocks], dim=2), probs


class _Given:
    """What the queries of one step may see by the mask that arrived, where no layer of ours keeps account."""

    def __init__(
        self, module: Any, query: torch.Tensor, total: int, mask: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        self.new, self.total, self.mask, self.device = query.shape[2], total, mask, query.device
        causal = kwargs.get("is_causal")
        self.causal = bool(getattr(module, "is_causal", True) if causal is None else causal)

    def visible(self, start: int, stop: int) -> torch.Tensor | None:
        if self.mask is None:
            if self.new == 1 or not self.causal:
                return None
            return _causal(stop - start, self.total, self.total - self.new + start, 0, self.device)
        return self.mask[:, :, start:stop] if self.mask.dtype == torch.bool else None

    def bias(self, start: int, stop: int) -> torch.Tensor | None:
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return self.mask[:, :, start:stop].clamp(min=torch.finfo(torch.float32).min / 2)
