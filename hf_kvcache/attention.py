"""The registered attention and mask functions, and `attach` / `detach`.

The attention function receives whatever `cache.update` returned. Handed a `KVView`, it attends over the layer's own
rows and then lets the layer finish its step; handed plain tensors, it passes them on to the implementation that was
set before. Prompts go to that implementation too; decoding reads every KV head once for its whole group of queries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layer import KVLayer, expected
from .offload.attend import chosen_columns, over_chosen, rows_of, where_they_lie
from .ops.attention import Block, Extras, attend, merge
from .ops.decode_attention import decode_attention
from .paging.attend import over_blocks, reads_in_pieces
from .policies.base import Step
from .segments import (
    DenseSegment,
    OffloadedPackedStore,
    OffloadedStore,
    PackedChain,
    PackedStore,
    PagedSegment,
    Ragged,
    Rows,
)
from .view import KVView

NAME = "hf_kvcache"
VARIES = "varies by layer"
ABSORBED = "_hf_kvcache_absorbed"  # what `hf_kvcache.mla.enable_absorb` leaves on a module
_before: dict[str, str] = {}  # our name -> the implementation it goes over

# Steps of up to this many tokens are attended with the group folded into the query length, longer ones by the
# implementation that was set before.
SHORT_STEP = 16
# Largest number of elements in one explicit mask or piece of an attention matrix.
PIECE_ELEMENTS = 1 << 24

_HONOURED = {"softcap", "s_aux", "sinks", "sliding_window", "position_bias", "is_causal"}
# What models pass along that does not change the attention of a layer with a cache.
_NEUTRAL = {
    "attention_mask",
    "cache",
    "cache_position",
    "deterministic",
    "hidden_states",
    "inputs_embeds",
    "kwargs",
    "labels",
    "logits_to_keep",
    "mm_token_type_ids",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_value",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "use_cache",
}


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    before: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention in transformers' calling convention; `before` is the implementation underneath."""
    absorbed = vars(module).get(ABSORBED)
    if absorbed is not None and absorbed.is_latent(module, key, value):
        if absorbed.takes(module, query, key, value, attention_mask, kwargs):
            return absorbed.attend(module, query, key, value, attention_mask, dropout, scaling, before, kwargs)
        key, value = absorbed.expand(module, key, value)
    if isinstance(key, KVView) and (not isinstance(value, KVView) or key.layer.pending is None):
        # The values were changed on the way (diffllama), or the rows are read again after their step.
        key, value = _plain(key), _plain(value)
    fresh = key.layer.pending if isinstance(key, KVView) else None
    if fresh is not None and fresh.rows.length != query.shape[2]:
        key, value = _cross(key), _cross(value)
    layer = _layer_of(module, key)
    if layer is None:
        if before == "sdpa" and any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks")):
            before = "eager"  # the stock SDPA implementation has none of them
        return _pass_on(before, module, query, key, value, attention_mask, dropout, scaling, kwargs)
    _check_model(layer, module)
    _check_extras(layer, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux")
    if kwargs.get("sinks") is not None:
        # A sink for each query (Inkling 2) is a sink of zero, with all other logits lowered by it; see `Sight`.
        sinks = query.new_zeros(query.shape[1])
    extras = Extras(scale, kwargs.get("softcap"), sinks, dropout if module.training else 0.0)
    # Models whose last layers use the keys of earlier ones (Gemma 3n) attend more than once over a layer's rows.
    layer.shared = layer.shared or bool(vars(module).get("store_full_length_kv"))
    expanded = not isinstance(key, KVView)
    sight = Sight(layer, query, attention_mask, kwargs)
    if isinstance(layer.segments, Ragged):
        if _decodes_by_head(layer, query, expanded, before):
            output = _by_head(layer.segments.heads, query, sight, extras)
            layer.finish_unseen()
            return output.transpose(1, 2).contiguous(), None
    elif not expanded and before != "eager" and layer.is_sealed and _over_segments(layer, query, before):
        output = _merged(layer.parts, query, sight, extras)
        if not layer.shared:
            layer.finish_unseen()
        return output.transpose(1, 2).contiguous(), None
    keys: torch.Tensor | None
    store = layer.segments
    short = query.shape[2] <= SHORT_STEP or not layer.is_prompt(query.shape[2])
    if isinstance(store, PackedStore) and short and not expanded and _is_packed(layer):
        keys = None
        output, weights = _over_packed(layer, store, before, query, sight, extras)
    elif isinstance(store, PagedSegment) and not expanded and before != "eager" and _reads_blocks(layer, store, query):
        keys = None
        visible, bias = _by_kv_head(sight.visible(0, sight.new), sight.bias(0, sight.new), store.shape[1])
        output, weights = over_blocks(store, query, extras, visible, bias).transpose(1, 2).contiguous(), None
    elif isinstance(store, OffloadedStore) and _attends_away(layer, store, query, expanded, before):
        keys = None
        output, weights = _over_pages(layer, store, before, query, sight, extras)
    else:
        rows = layer.current()
        keys = key if expanded else rows.keys
        values = value if expanded else rows.values
        if not torch.is_autocast_enabled(query.device.type):
            # Rows that were written under autocast, or in another dtype, on an earlier turn.
            keys, values = keys.to(query.dtype), values.to(query.dtype)
        front = None if expanded else layer.front()
        output, weights = _attend(
            layer, before, module, query, keys, values, sight, extras, front[1] if front else None, kwargs
        )
    policy = layer.policy
    pending = layer.pending
    assert pending is not None
    if isinstance(store, PackedStore) and not policy.drops and not layer.shared:
        layer.finish_unseen()
        return output, (weights.to(query.dtype) if weights is not None and before == "eager" else None)
    if pending.step is not None and layer.shared:  # a later layer, with the keys of this one
        return output, (weights.to(query.dtype) if weights is not None and before == "eager" else None)
    step = Step(
        rows=layer.current() if keys is None else rows,
        new=query.shape[2],
        start=pending.start,
        query=query.detach() if policy.needs_queries else None,
        # Keys in a staging buffer are another layer's soon: they are read again where they are needed.
        model_keys=None if keys is None or (isinstance(store, OffloadedStore) and not expanded) else keys.detach(),
        visible=sight.visible,
        bias=sight.bias,
        real=sight.real,
        extras=extras,
        prompt=layer.is_prompt(query.shape[2]),
        probs=weights.detach().float()
        if weights is not None and policy.wants_probs(query.shape[2], pending.held)
        else None,
        horizon=layer.horizon(pending.start + query.shape[2]),
        padding=layer.padding,
    )
    layer.finish(step)
    return output, (weights.to(query.dtype) if weights is not None and before == "eager" else None)


class Sight:
    """What the queries of one step may see, for any range of them.

    From the mask that arrives only the block among the new tokens is used, except while the layer still holds every
    token in order: then the whole mask fits, and is used as it is.
    """

    def __init__(self, layer: KVLayer, query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        new = query.shape[2]
        pending = layer.pending
        assert pending is not None
        self.new, self.total, self.held = new, pending.held + new, pending.held
        self.device = query.device
        self.additive: torch.Tensor | None = None  # a float mask of full width that is more than a mask
        self.whole: torch.Tensor | None = None  # bool, full width
        self.block: torch.Tensor | None = None  # bool [B, 1, new, new]
        self.causal = True
        is_causal = kwargs.get("is_causal")
        if mask is None:
            self.causal = True if is_causal is None else bool(is_causal)
        elif mask.ndim == 2:
            self.block = mask[:, None, None, -new:].bool() & _causal(new, new, 0, new, query.device)
        elif mask.ndim == 4:
            self._read(layer, mask)
        else:
            raise NotImplementedError(f"an attention mask of shape {tuple(mask.shape)} is not understood")
        self.real: torch.Tensor | None = None
        if self.block is not None:
            diagonal = self.block[:, 0].diagonal(dim1=-2, dim2=-1)  # [B, new]
            if layer.has_empty or not bool(diagonal.all()):
                self.real = diagonal.expand(query.shape[0], -1)
                layer.note_padding(self.real)
        self.past: torch.Tensor | None = None
        if pending.held and not (layer.complete and (mask is None or self.whole is not None)):
            index = torch.arange(pending.start, pending.start + new, device=query.device)
            positions = layer.positions[:, :, : pending.held]
            self.past = layer.past_visibility(positions, index, kwargs.get("sliding_window"))
        self.position_bias = self._columns(layer, kwargs.get("position_bias"))
        if kwargs.get("sinks") is not None:
            lowered = -kwargs["sinks"].float()  # [B, Hq, new, 1]
            self.position_bias = lowered if self.position_bias is None else self.position_bias.float() + lowered

    def _read(self, layer: KVLayer, mask: torch.Tensor) -> None:
        if mask.dtype == torch.bool:
            visible = mask
        else:
            visible = mask > torch.finfo(mask.dtype).min / 2
            graded = bool((visible & (mask != 0)).any())
            if graded and (layer.policy.drops or not layer.complete):
                raise NotImplementedError(
                    f"{layer.technique} drops tokens, but this model adds a position-dependent bias through its "
                    "attention mask, which fits no more when tokens are gone. Use KVCache."
                )
            if graded:
                self.additive = mask
        if layer.complete and mask.shape[-1] == self.total:
            self.whole = visible
        self.block = visible[..., -self.new :]

    def _columns(self, layer: KVLayer, bias: torch.Tensor | None) -> torch.Tensor | None:
        """A bias over all positions, brought to the rows that are held."""
        if bias is None:
            return None
        if layer.policy.drops:
            layer.full_width = True  # from now on, positions of dropped tokens need their column too
        if bias.shape[-1] == self.total and layer.complete:
            return bias
        if bias.shape[-1] != layer.get_seq_length():
            raise NotImplementedError(
                f"{layer.technique}: this model made a position bias for {bias.shape[-1]} tokens where "
                f"{layer.get_seq_length()} were given, so it cannot be brought to the rows that are held"
            )
        index = layer.positions.clamp(min=0).long()  # [B, H|1, N]
        batch, heads = index.shape[0], bias.shape[1]
        if index.shape[1] not in (1, heads):
            index = index.repeat_interleave(heads // index.shape[1], dim=1)
        index = index.expand(batch, heads, -1)[:, :, None, :].expand(-1, -1, bias.shape[2], -1)
        return bias.expand(batch, -1, -1, -1).gather(-1, index)

    def visible(self, start: int, stop: int) -> torch.Tensor | None:
        """Bool `[B|1, H|1, stop-start, total]` for queries `start:stop`, or None where they see every row."""
        if self.whole is not None:
            return self.whole[..., start:stop, :]
        if self.block is not None:
            block = self.block[..., start:stop, :]
        elif self.causal and self.new > 1:
            block = _causal(stop - start, self.new, start, self.new, self.device)
        elif self.past is None:
            return None
        else:
            block = torch.ones(1, 1, stop - start, self.new, dtype=torch.bool, device=self.device)
        if not self.held:
            return block
        if self.past is None:
            past = torch.ones(1, 1, 1, self.held, dtype=torch.bool, device=self.device)
        else:
            past = self.past[..., start:stop, :]
        batch, heads = max(past.shape[0], block.shape[0]), max(past.shape[1], block.shape[1])
        q = stop - start
        return torch.cat([past.expand(batch, heads, q, -1), block.expand(batch, heads, q, -1)], dim=-1)

    def bias(self, start: int, stop: int) -> torch.Tensor | None:
        """Additive `[B|1, Hq|1, stop-start, total]`, or None."""
        parts = [x[..., start:stop, :] for x in (self.position_bias, self.additive) if x is not None]
        return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _causal(rows: int, columns: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Bool `[1, 1, rows, columns]`: query `start + i` sees columns up to itself."""
    query = torch.arange(start, start + rows, device=device)
    return (torch.arange(columns, device=device)[None, :] <= query[:, None])[None, None]


def _attend(
    layer: KVLayer,
    before: str,
    module: nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sight: Sight,
    extras: Extras,
    front: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output `[B, Q, Hq, Dv]`, and float32 weights `[B, Hq, Q, N]` where they had to be computed."""
    new = query.shape[2]
    pending = layer.pending
    assert pending is not None
    want = before == "eager" or layer.policy.wants_probs(new, pending.held)
    # The stock SDPA implementation has neither soft caps nor attention sinks; sinks of each query are in the bias.
    own = before == "sdpa" and (extras.softcap is not None or extras.sinks is not None)
    own = own or kwargs.get("sinks") is not None
    if new > SHORT_STEP or not pending.held:
        if not own:
            if front is not None:
                keys = torch.cat([front, keys[:, :, front.shape[2] :]], dim=2)
            return _long_step(before, module, query, keys, values, sight, extras, kwargs)
        return _in_pieces(query, keys, values, sight, extras, front)
    visible, bias = sight.visible(0, new), sight.bias(0, new)
    plain = bias is None and front is None and extras.softcap is None and extras.sinks is None and not extras.dropout
    if plain and not want:
        return _packed_sdpa(query, keys, values, visible, extras.scaling).transpose(1, 2).contiguous(), None
    visible, bias = _by_kv_head(visible, bias, keys.shape[1])
    block = attend(query, keys, values, extras, visible, bias, front, need_probs=want)
    return block.output.transpose(1, 2).contiguous(), block.probs


def _is_packed(layer: KVLayer) -> bool:
    """Whether a layer with a codec has rows that are not in its exact tail."""
    store, pending = layer.segments, layer.pending
    assert isinstance(store, PackedStore) and pending is not None
    return pending.written and store.in_parts


def _reads_blocks(layer: KVLayer, store: PagedSegment, query: torch.Tensor) -> bool:
    """Whether a short step goes over the blocks of a pool as they lie."""
    pending, policy = layer.pending, layer.policy
    assert pending is not None
    if query.shape[2] > SHORT_STEP or not pending.written or not reads_in_pieces(store):
        return False
    # Sinks that are moved stand in for rows in their blocks.
    return policy.fifo_window is None and not policy.wants_probs(query.shape[2], pending.held)


def _over_packed(
    layer: KVLayer, store: PackedStore, before: str, query: torch.Tensor, sight: Sight, extras: Extras
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A short step over packed rows as they lie: output `[B, Q, Hq, Dv]`, and weights where somebody asks for them."""
    new = query.shape[2]
    assert layer.pending is not None
    want = before == "eager" or layer.policy.wants_probs(new, layer.pending.held)
    draft = new > 1 and not layer.is_prompt(new) and not layer.policy.drops
    cuts = store.due(new) if draft and query.shape[0] == 1 and not layer.has_empty else []
    blocks = []
    for start, stop in zip([0, *cuts], [*cuts, new], strict=True):
        # A draft is checked in one step, but each of its tokens sees what it would see if they came one by one.
        seen = store if not start else store.as_of(new - start)
        blocks.append(_packed_block(layer, seen, query, sight, extras, start, stop, want))
    output = blocks[0].output if len(blocks) == 1 else torch.cat([block.output for block in blocks], dim=2)
    probs = torch.cat([block.probs for block in blocks if block.probs is not None], dim=2) if want else None
    return output.transpose(1, 2).contiguous(), probs


def _packed_block(
    layer: KVLayer,
    store: PackedStore,
    query: torch.Tensor,
    sight: Sight,
    extras: Extras,
    start: int,
    stop: int,
    want: bool,
) -> Block:
    """Queries `start:stop` over the rows of `store`."""
    computes = isinstance(store, OffloadedPackedStore) and not want and store.computes(query)
    front, packed, tail = (store.front, None, store.tail.pair) if computes else store.attended()
    heads = tail[0].shape[1]
    visible, bias = _by_kv_head(sight.visible(start, stop), sight.bias(start, stop), heads)
    if isinstance(store, PackedChain) and store.sealed:
        return _packed_parts(store, query[:, :, start:stop], visible, bias, extras, want)
    moved, first = layer.front(), None
    if front is not None:
        first = _exact(front.keys, front.values, moved, query.dtype)
    elif moved is not None:
        tail = _exact(*tail, moved, query.dtype)
    if tail[0].dtype != query.dtype:
        tail = _exact(*tail, None, query.dtype)
    if computes and isinstance(store, OffloadedPackedStore):
        return store.where_they_lie(query[:, :, start:stop], first, tail, extras, visible, bias)
    return decode_attention(query[:, :, start:stop], first, packed, tail, extras, visible, bias, need_probs=want)


def _exact(
    keys: torch.Tensor, values: torch.Tensor, moved: tuple[str, torch.Tensor] | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact rows in the model's dtype, the first of them moved where a policy moves sinks."""
    pair = {"keys": keys, "values": values}
    if moved is not None:
        which, sinks = moved
        pair[which] = torch.cat([sinks, pair[which][:, :, sinks.shape[2] :]], dim=2)
    return pair["keys"].to(dtype), pair["values"].to(dtype)


def _over_segments(layer: KVLayer, query: torch.Tensor, before: str) -> bool:
    """Whether a step goes over the segments as they lie: short ones, and those that would copy rows for a batch."""
    if query.shape[2] <= SHORT_STEP:
        return True
    # Long steps keep their queries' probabilities for the backward pass, so there SDPA over a copy takes less.
    return layer.is_shared_by_rows and before == "sdpa" and not torch.is_grad_enabled()


def _attends_away(layer: KVLayer, store: OffloadedStore, query: torch.Tensor, expanded: bool, before: str) -> bool:
    """Whether a step goes over pages where they lie, or over some of them; any other brings them all to the device."""
    pending, new = layer.pending, query.shape[2]
    if new > SHORT_STEP or expanded or pending is None or not pending.written or not store.is_away:
        return False
    want = before == "eager" or layer.policy.wants_probs(new, pending.held)
    return store.selects(new) or (not want and store.computes(query))


def _over_pages(
    layer: KVLayer, store: OffloadedStore, before: str, query: torch.Tensor, sight: Sight, extras: Extras
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A short step over pages beyond the device: output `[B, Q, Hq, Dv]`, and weights where somebody asks for them."""
    new = query.shape[2]
    store.unstage()
    if not store.selects(new):
        visible, bias = _by_kv_head(sight.visible(0, new), sight.bias(0, new), store.shape[1])
        return where_they_lie(store, query, extras, visible, bias).transpose(1, 2).contiguous(), None
    # Each query chooses its own pages, as it would alone.
    blocks = [
        _over_top_pages(store, query[:, :, i : i + 1], i, sight, extras, want=before == "eager") for i in range(new)
    ]
    probs = [block.probs for block in blocks if block.probs is not None]
    output = torch.cat([block.output for block in blocks], dim=2)
    return output.transpose(1, 2).contiguous(), torch.cat(probs, dim=2) if probs else None


def _over_top_pages(
    store: OffloadedStore, query: torch.Tensor, i: int, sight: Sight, extras: Extras, want: bool
) -> Block:
    """The query `i` of a step over the pages that can matter to it, and the rows that are always read."""
    stop = store.length - sight.new + i + 1
    pages, rest = store.chosen(query, stop, extras.scaling)
    rows, away = rows_of(pages, store.page), store.away_rows
    visible, bias = _by_kv_head(sight.visible(i, i + 1), sight.bias(i, i + 1), store.shape[1])
    masks = [chosen_columns(mask, rows, rest, stop) for mask in (visible, bias)]
    tail = [t[:, :, rest - away : stop - away].to(query.dtype) for t in (store.tail.rows.keys, store.tail.rows.values)]
    if store.computes(query) and not want:
        return over_chosen(store, query, pages, tail, extras, masks)
    found = store.gather(pages, query.device)
    keys, values = (torch.cat([t.to(query.dtype), near], dim=2) for t, near in zip(found, tail, strict=True))
    plain = masks[1] is None and extras.softcap is None and extras.sinks is None and not extras.dropout
    if plain and not want:
        return Block(_packed_sdpa(query, keys, values, masks[0], extras.scaling), None, None)
    block = attend(query, keys, values, extras, masks[0], masks[1], need_probs=want)
    if block.probs is None:
        return block
    group = query.shape[1] // rows.shape[1]
    others = torch.arange(rest, stop, device=rows.device).expand(*rows.shape[:2], -1)
    columns = torch.cat([rows, others], dim=-1).repeat_interleave(group, dim=1)[:, :, None]
    whole = block.probs.new_zeros(*block.probs.shape[:3], store.length).scatter_(-1, columns, block.probs)
    return Block(block.output, None, whole)


def _merged(parts: list[Rows], query: torch.Tensor, sight: Sight, extras: Extras) -> torch.Tensor:
    """A step over several segments: each is attended where it lies, and the results are merged."""
    piece = max(1, PIECE_ELEMENTS // (query.shape[0] * query.shape[1] * sight.total))
    piece = sight.new if sight.new <= SHORT_STEP else piece
    alone = extras._replace(sinks=None)
    outputs = []
    for first in range(0, sight.new, piece):
        last = min(first + piece, sight.new)
        visible, bias = _by_kv_head(sight.visible(first, last), sight.bias(first, last), parts[0].keys.shape[1])
        blocks, start = [], 0
        for part in parts:
            stop = start + part.length
            keys, values = part.keys.to(query.dtype), part.values.to(query.dtype)
            attend_part = partial(attend, keys=keys, values=values, extras=alone, need_lse=True)
            mask, added = _columns(visible, start, stop), _columns(bias, start, stop)
            blocks.append(_for_all_rows(attend_part, query[:, :, first:last], keys.shape[0], mask, added))
            start = stop
        outputs.append(merge(blocks, extras.sinks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _packed_parts(
    store: PackedChain,
    query: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    extras: Extras,
    want: bool,
) -> Block:
    """Attention over sealed parts and what came after them, merged."""
    alone = extras._replace(sinks=None)
    blocks, start = [], 0
    for part in (*store.sealed, store):
        front, packed, tail = part.attended()
        first = None if front is None else _exact(front.keys, front.values, None, query.dtype)
        rest = _exact(*tail, None, query.dtype)
        length = rest[0].shape[2] + sum(rows.length for rows in (front, packed) if rows is not None)
        stop = start + length
        attend_part = partial(
            decode_attention, front=first, packed=packed, tail=rest, extras=alone, need_probs=want, need_lse=True
        )
        mask, added = _columns(visible, start, stop), _columns(bias, start, stop)
        blocks.append(_for_all_rows(attend_part, query, rest[0].shape[0], mask, added))
        start = stop
    output = merge(blocks, extras.sinks)
    if not want:
        return Block(output, None, None)
    lse = torch.stack([block.lse for block in blocks if block.lse is not None])
    total = torch.logsumexp(lse, dim=0)
    if extras.sinks is not None:
        total = torch.logaddexp(total, extras.sinks.float()[None, :, None])
    shares = torch.exp(lse - total)[..., None]
    probs = [block.probs * share for block, share in zip(blocks, shares, strict=True) if block.probs is not None]
    return Block(output, None, torch.cat(probs, dim=-1))


def _columns(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if mask is None else mask[..., start:stop]


def _for_all_rows(
    attend_part: Callable[..., Block],
    query: torch.Tensor,
    batch: int,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Block:
    """Attention over rows of `batch` batch rows: one that stands for all is read once, by the queries of all."""
    rows, heads, new, dim = query.shape
    if batch == rows:
        return attend_part(query, visible=visible, bias=bias)

    def fold(mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None or (mask.shape[0] == 1 and mask.shape[2] == 1):
            return mask
        wide = mask.expand(rows, -1, new, -1)
        return wide.transpose(0, 1).reshape(1, mask.shape[1], rows * new, mask.shape[3])

    def unfold(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.reshape(heads, rows, new, *tensor.shape[3:]).transpose(0, 1)

    folded = query.transpose(0, 1).reshape(1, heads, rows * new, dim)
    block = attend_part(folded, visible=fold(visible), bias=fold(bias))
    output = unfold(block.output)
    assert output is not None
    return Block(output, unfold(block.lse), unfold(block.probs))


def _decodes_by_head(layer: KVLayer, query: torch.Tensor, expanded: bool, before: str) -> bool:
    """Whether a step goes over heads of different lengths as they lie: one after which nothing is dropped."""
    short = query.shape[2] <= SHORT_STEP and layer.pending is not None and layer.pending.written
    final = not layer.record_past and not layer.is_sliding and not layer.is_prompt(query.shape[2])
    return short and final and not expanded and not layer.shared and before != "eager"


def _by_head(heads: list[DenseSegment], query: torch.Tensor, sight: Sight, extras: Extras) -> torch.Tensor:
    """A short step over heads of different lengths, each attended where it lies."""
    group = query.shape[1] // len(heads)
    visible, bias = _by_kv_head(sight.visible(0, sight.new), sight.bias(0, sight.new), len(heads))
    outputs = []
    for index, head in enumerate(heads):
        rows = head.rows
        mine = query[:, index * group : (index + 1) * group]
        keys, values = rows.keys.to(query.dtype), rows.values.to(query.dtype)
        # Shorter heads stand at the end of the common width.
        mask = None
        if visible is not None:
            mask = visible if visible.shape[1] == 1 else visible[:, index : index + 1]
            mask = mask[..., sight.total - rows.length :]
        added = None
        if bias is not None:
            added = bias if bias.shape[1] == 1 else bias[:, index * group : (index + 1) * group]
            added = added[..., sight.total - rows.length :]
        sinks = None if extras.sinks is None else extras.sinks[index * group : (index + 1) * group]
        own = extras._replace(sinks=sinks)
        if added is None and extras.softcap is None and sinks is None and not extras.dropout:
            outputs.append(_packed_sdpa(mine, keys, values, mask, extras.scaling))
        else:
            outputs.append(attend(mine, keys, values, own, mask, added).output)
    return torch.cat(outputs, dim=1)


def _by_kv_head(
    visible: torch.Tensor | None, bias: torch.Tensor | None, heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A mask with one entry for each *query* head becomes part of the bias."""
    if visible is None or visible.shape[1] in (1, heads):
        return visible, bias
    extra = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, torch.finfo(torch.float32).min)
    return None, extra if bias is None else (bias + extra).clamp(min=torch.finfo(torch.float32).min)


def _packed_sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """SDPA with the group folded into the query length: keys and values are read once per KV head."""
    b, hq, q, d = query.shape
    hk = keys.shape[1]
    group = hq // hk
    folded = query.reshape(b, hk, group * q, d)
    mask = None
    if visible is not None:
        if visible.shape[1] == hq and hq != hk:
            mask = visible.reshape(visible.shape[0], hk, group * q, -1)
        elif q == 1:
            mask = visible
        else:
            mask = visible.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)
    output = nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(b, hq, q, values.shape[-1])


def _in_pieces(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sight: Sight,
    extras: Extras,
    front: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """A long step with soft caps or attention sinks, a piece of the queries at a time."""
    piece = max(1, PIECE_ELEMENTS // (query.shape[0] * query.shape[1] * keys.shape[2]))
    outputs = []
    for start in range(0, query.shape[2], piece):
        stop = min(start + piece, query.shape[2])
        visible, bias = _by_kv_head(sight.visible(start, stop), sight.bias(start, stop), keys.shape[1])
        outputs.append(attend(query[:, :, start:stop], keys, values, extras, visible, bias, front).output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _long_step(
    before: str,
    module: nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sight: Sight,
    extras: Extras,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A prompt: the implementation that was set before, with a mask over the rows that are there."""
    new, total, heads = query.shape[2], keys.shape[2], query.shape[1]
    kwargs = dict(kwargs, position_bias=sight.position_bias) if sight.position_bias is not None else kwargs
    if not sight.held and sight.block is None and sight.additive is None:
        return _pass_on(before, module, query, keys, values, None, extras.dropout, extras.scaling, kwargs)
    if sight.additive is not None:
        return _pass_on(before, module, query, keys, values, sight.additive, extras.dropout, extras.scaling, kwargs)
    if sight.whole is not None or not sight.held:
        mask = sight.visible(0, new)
        return _pass_on(before, module, query, keys, values, mask, extras.dropout, extras.scaling, kwargs)
    # A mask of this library's own making may differ by head; flash and flex have no such form.
    if before not in ("sdpa", "eager"):
        before = "sdpa"
    outputs, weights = [], []
    piece = max(1, PIECE_ELEMENTS // total)
    for start in range(0, new, piece):
        stop = min(start + piece, new)
        mask = sight.visible(start, stop)
        if mask is not None and mask.shape[1] not in (1, heads):
            mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
        part = kwargs
        if kwargs.get("position_bias") is not None:
            part = dict(kwargs, position_bias=kwargs["position_bias"][:, :, start:stop])
        output, weight = _pass_on(
            before, module, query[:, :, start:stop], keys, values, mask, extras.dropout, extras.scaling, part
        )
        outputs.append(output)
        weights.append(weight)
    joined = None if weights[0] is None else torch.cat([w for w in weights if w is not None], dim=2)
    return torch.cat(outputs, dim=1), joined


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A view as a tensor. Raises `NotImplementedError` where it cannot stand for what was given to the layer."""
    if not isinstance(tensor, KVView):
        return tensor
    layer = tensor.layer
    if layer.policy.drops and layer.pending is None:
        raise NotImplementedError(
            f"{layer.technique} drops tokens, but this model attends to the keys of layer {layer.layer_idx} again "
            "after that layer's own attention, when some may be gone. Use KVCache or a cache that keeps every token."
        )
    return tensor.materialize()


def _cross(tensor: torch.Tensor) -> torch.Tensor:
    """Keys or values of an encoder, not those of the queries' own tokens: as they are, with their own mask."""
    if not isinstance(tensor, KVView):
        return tensor
    if tensor.layer.policy.drops:
        raise NotImplementedError(
            f"{tensor.layer.technique} drops tokens of the decoder; it cannot hold the keys of cross-attention. Use "
            "EncoderDecoderCache(this_cache, DynamicCache())."
        )
    return tensor.materialize()


def _layer_of(module: nn.Module, key: torch.Tensor) -> KVLayer | None:
    if isinstance(key, KVView):
        return key.layer
    # Keys that were read and expanded before they came here (MLA).
    last = getattr(expected, "layer", None)
    expected.layer = None
    layer: KVLayer | None = None if last is None else last()
    if layer is None or not layer.expanded or layer.pending is None:
        return None
    if getattr(module, "layer_idx", None) != layer.layer_idx or key.shape[2] != layer.total:
        return None
    return layer


def _check_model(layer: KVLayer, module: nn.Module) -> None:
    config = getattr(module, "config", None)
    if config is None or layer.signature is None or id(module) in layer.checked:
        return
    layer.checked.add(id(module))
    given = signature_of(config.get_text_config(decoder=True))  # encoder and decoder may differ in size
    pairs = zip(given[1:], layer.signature[1:], strict=True)
    if any(a != b and VARIES not in (a, b) for a, b in pairs):
        raise ValueError(
            f"this {layer.technique} was made for a model with {_words(layer.signature)} but is used with one with "
            f"{_words(given)}: make a cache for each model"
        )


def signature_of(config: Any) -> tuple[Any, ...]:
    """What tells two models' caches apart: model type, and the sizes of keys and values."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return (getattr(config, "model_type", None), *(_field(config, name) for name in names))


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # a config of layers with different sizes refuses to name one for all
        return VARIES


def _words(signature: tuple[Any, ...]) -> str:
    names = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return ", ".join(f"{name}={value}" for name, value in zip(names, signature, strict=True) if value is not None)


def _check_extras(layer: KVLayer, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is None or value is False or name in _HONOURED or name in _NEUTRAL:
            continue
        raise NotImplementedError(
            f"this model passes `{name}` to its attention, which {layer.technique} does not know and will not ignore. "
            "Use transformers' DynamicCache for this model."
        )


def _pass_on(
    before: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the implementation underneath, with the mask in the form that it takes."""
    function = _eager_of(module) if before == "eager" else ALL_ATTENTION_FUNCTIONS[before]
    kwargs = dict(kwargs)
    is_causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    new = query.shape[2]
    if before == "eager":
        kwargs.pop("is_causal", None)
        if mask is None and causal and new > 1:
            mask = _causal(new, key.shape[2], key.shape[2] - new, 0, query.device)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
                ~mask, torch.finfo(query.dtype).min
            )
    elif before == "flex_attention":
        mask = _block_mask(mask, causal, query, key)
    elif before != "sdpa" and mask is not None and mask.ndim == 4 and mask.dtype == torch.bool:
        # flash: the padding of each row, from the last query that is not padding itself
        mask = mask[:, 0].any(dim=1)
        mask = None if bool(mask.all()) else mask
    if scaling is not None:
        kwargs["scaling"] = scaling
    if before in ("sdpa", "eager", "flex_attention"):
        return function(module, query, key, value, mask, dropout=dropout, **kwargs)
    # Flash implementations look their kernel up by the configured name.
    config: Any = module.config
    mine = config._attn_implementation
    config._attn_implementation_internal = before
    try:
        return function(module, query, key, value, mask, dropout=dropout, **kwargs)
    finally:
        config._attn_implementation_internal = mine


def _block_mask(mask: torch.Tensor | None, causal: bool, query: torch.Tensor, key: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    offset = key.shape[2] - query.shape[2]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    if mask is None and not causal:
        return None

    def sees(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv <= q + offset if mask is None else mask[b, 0, q, kv]

    return create_block_mask(sees, query.shape[0], None, query.shape[2], key.shape[2], device=query.device)


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The `eager_attention_forward` of the file that defines the module."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise NotImplementedError(
        f"{type(module).__name__} has no eager attention function; load the model with attn_implementation='sdpa'"
    )


# ---------------------------------------------------------------------- attach and detach


def _register(before: str) -> str:
    name = NAME if before == "sdpa" else f"{NAME}_{before.replace('flash', 'fl').replace('/', '.')}"
    if name not in _before:
        _before[name] = before
        AttentionInterface.register(name, partial(attention_forward, before=before))
        # Models without SDPA read their masks themselves too (GIT adds them, indexers do), so the form must stay.
        AttentionMaskInterface.register(name, eager_mask if before == "eager" else sdpa_mask)
    return name


_register("sdpa")


def _configs(model: PreTrainedModel) -> list[Any]:
    """Configs of the submodels that decode: the text model, or all of an encoder-decoder model."""
    decoder = model.config.get_text_config(decoder=True)
    found: list[Any] = []
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        config = module.config
        if (config is decoder or model.config.is_encoder_decoder) and not any(config is other for other in found):
            found.append(config)
    return found


def _attention_models(model: PreTrainedModel) -> list[PreTrainedModel]:
    configs = _configs(model)
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and any(m.config is c for c in configs)]


def why_not_attach(model: PreTrainedModel) -> str | None:
    """What is in the way of `attach`, or None."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a transformers model, got {type(model).__name__}")
    models = _attention_models(model)
    if not models or not all(m._can_set_attn_implementation() for m in models):
        return f"{type(model).__name__} has attention code of its own"
    if any(getattr(module, "indexer", None) is not None for module in model.modules()):
        # They build the mask of the chosen tokens only where the implementation is called "eager" or "sdpa".
        return f"{type(model).__name__} chooses the tokens it attends to with an indexer"
    return None


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Route the attention of `model` through this library; every other cache keeps working. Idempotent.

    Passing a model to a cache does this. The implementation that was set before (SDPA, flash, flex, eager) keeps
    computing prompts, and `detach` brings it back.

    Raises:
        NotImplementedError: the model has attention code of its own, without transformers' attention interface, or
            depends on the name of its implementation.
    """
    reason = why_not_attach(model)
    if reason is not None:
        raise NotImplementedError(
            f"{reason} and cannot be attached. KVCache works with it as it is; caches that drop tokens do not."
        )
    for config in _configs(model):
        if not is_ours(config._attn_implementation):
            config._attn_implementation_internal = _register(config._attn_implementation or "eager")
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Bring back the attention implementation that `attach` found. Does nothing on a model that is not attached."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a transformers model, got {type(model).__name__}")
    for config in _configs(model):
        if is_ours(config._attn_implementation):
            config._attn_implementation_internal = _before[config._attn_implementation]
    return model


def is_ours(name: str | None) -> bool:
    return name in _before
