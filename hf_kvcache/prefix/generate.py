"""`store.generate`: what `generate` is given, so that as little as possible of it has to be computed."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from ..cache import KVCache
from ..layer import KVLayer
from . import rows
from .keys import key_of, placeholders
from .tree import common_length

if TYPE_CHECKING:
    from .store import PrefixStore

# Tokens that must be saved before it pays to compute a common prefix in a step of its own.
LEAST = 16
NO_CACHE = "`use_cache` is False"
# What transformers hands to a model with the first step of a text only: of no use once those tokens are in the cache.
_FIRST_STEP_ONLY = ("pixel_", "input_features", "input_values", "image_patches", "high_res_", "num_local_patches")
_BY_TOKEN = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_TEXT = ("input_ids", "attention_mask", *_BY_TOKEN)


class Request(NamedTuple):
    """One call, taken apart."""

    ids: torch.Tensor  # [B, T] on the CPU
    real: list[torch.Tensor]  # of each row, the ids that are no padding
    padded: bool
    content: dict[str, Any]  # inputs beside the ids, such as images
    given: dict[str, Any]  # every input as it was given
    repeats: int  # beams, or sequences to return
    feeds_all: bool  # transformers feeds the whole text, whatever the cache holds
    why_not: str | None  # why rows cannot share a prefix, or None


def run(store: PrefixStore, model: Any, inputs: Any, kwargs: dict[str, Any]) -> Any:
    """See `PrefixStore.generate`."""
    inner = store.check_model(model)
    cache = store.new_cache(model)
    request, kwargs = _take_apart(inner, cache, inputs, kwargs)
    name = cache_name(inner)
    if request.why_not is not None:
        store._warn(f"unshared {request.why_not}", f"{request.why_not}; this call shares no prefix")
        # A model that is told to use no cache feeds its last token alone all the same where it is given one.
        mine = {} if request.why_not == NO_CACHE else {name: cache}
        output = model.generate(**request.given, **kwargs, **mine)
        if request.feeds_all and not request.padded:
            _keep(store, inner, cache, request, output if isinstance(output, torch.Tensor) else output.sequences)
        return output
    batch, width = request.ids.shape
    prefix = request.real[0][: _most(inner, request)]
    found = store.fill(model, cache, prefix, 1, request.content, times=batch * request.repeats)
    found = _read_common(store, model, inner, cache, request, prefix, found)
    if batch * request.repeats > 1:
        rows.free(cache)
        rows.spread(cache, batch * request.repeats)
    given = dict(request.given)
    if request.content and found and found >= placeholders(inner.config, request.real[0])[1]:
        given = {key: value for key, value in given.items() if not key.startswith(_FIRST_STEP_ONLY)}
    moved = request.padded and found > 0
    if moved:
        given |= _moved(request, found)
    output = model.generate(**given, **kwargs, **{name: cache})
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    if not request.padded:
        _keep(store, inner, cache, request, sequences)
    if not moved:
        return output
    begun = request.given["input_ids"].repeat_interleave(len(sequences) // batch, dim=0)
    sequences = torch.cat([begun.to(sequences.device), sequences[:, width:]], dim=1)
    if isinstance(output, torch.Tensor):
        return sequences
    output.sequences = sequences
    return output


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def cache_name(inner: Any) -> str:
    """What the model calls the cache: transformers 5.24 renamed the argument."""
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


@torch.no_grad()
def read(inner: Any, cache: KVCache, ids: torch.Tensor) -> None:
    """Feed `ids` `[1, T]` to a transformers model for what the cache then holds."""
    known = inspect.signature(inner.forward).parameters
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    size = getattr(getattr(inner, "generation_config", None), "prefill_chunk_size", None) or ids.shape[1]
    for piece in ids.to(inner.device).split(size, dim=1):
        inner(input_ids=piece, use_cache=True, **{cache_name(inner): cache}, **more)


_continues: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@torch.no_grad()
def continues(inner: Any) -> bool:
    """Whether a model can be fed a text in two parts, tried once: some cannot, some drop their recurrent states."""
    if inner not in _continues:
        vocabulary = inner.config.get_text_config(decoder=True).vocab_size
        ids = (torch.arange(16, device=inner.device)[None] * 7919 + 11) % vocabulary
        training = inner.training
        inner.eval()
        try:
            cache = KVCache(inner)
            whole = inner(input_ids=ids, use_cache=False).logits[:, -1].float()
            read(inner, cache, ids[:, :9])
            parts = inner(input_ids=ids[:, 9:], use_cache=True, **{cache_name(inner): cache}).logits[:, -1].float()
            # Rounding may send a token to another expert, so only states that are lost for certain count.
            recurrent = any(hasattr(layer, "conv_states") for layer in cache.layers)
            near = 0.05 if next(inner.parameters()).dtype == torch.float32 else 0.5
            _continues[inner] = not recurrent or float((whole - parts).abs().max()) <= near * float(whole.std())
        except Exception:
            _continues[inner] = False
        finally:
            inner.train(training)
    return _continues[inner]


def _take_apart(inner: Any, cache: KVCache, inputs: Any, kwargs: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
    kwargs = dict(kwargs)
    if isinstance(inputs, torch.Tensor):
        given: dict[str, Any] = {"input_ids": inputs}
    elif inputs is None or isinstance(inputs, Mapping):
        given = dict(inputs or {})
    else:
        raise ValueError(f"`inputs` must be token ids or a mapping of inputs, got {type(inputs).__name__}")
    for key in list(kwargs):
        if isinstance(kwargs[key], torch.Tensor) and not key.startswith("negative_prompt"):
            given[key] = kwargs.pop(key)
    given = {key: value for key, value in given.items() if value is not None}
    for key in ("inputs_embeds", "position_ids", "past_key_values", "cache", "cache_implementation"):
        if given.get(key) is not None or kwargs.get(key) is not None:
            raise ValueError(
                f"`store.generate` finds prefixes by token ids and makes the cache itself; leave `{key}` out"
            )
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise ValueError("`inputs` must hold `input_ids` [batch, tokens]")
    config = kwargs.get("generation_config") or inner.generation_config

    def setting(name: str) -> Any:
        return kwargs[name] if kwargs.get(name) is not None else getattr(config, name, None)

    mask = given.get("attention_mask")
    if mask is None:
        mask = _inferred_mask(ids, setting("pad_token_id"), setting("eos_token_id"))
    real = mask.to("cpu").bool()
    padded = not bool(real.all())
    content = {key: value for key, value in given.items() if key not in _TEXT}
    why = None
    drafts = kwargs.get("assistant_model") is not None
    drafts = drafts or any(setting(key) for key in ("prompt_lookup_num_tokens", "assistant_early_exit"))
    pieces = bool(setting("prefill_chunk_size")) and _version() < (5, 24)
    if setting("use_cache") is False:
        why = NO_CACHE
    elif content and len(ids) > 1:
        why = f"which rows the inputs {', '.join(sorted(content))} belong to is the model's business"
    elif drafts:
        why = "with drafts, transformers feeds the whole text again whatever the cache holds"
    elif pieces:
        why = "before transformers 5.24, `prefill_chunk_size` feeds the whole text again"
    elif not content and any(bool(given[key].any()) for key in _BY_TOKEN if key in given):
        why = "keys depend on token types"
    elif padded:
        why = _why_not_padded(inner, cache, real, given, content, kwargs, setting)
    rows_ = [row[keep] for row, keep in zip(ids.to("cpu", torch.int64), real, strict=True)]
    repeats = max(setting("num_beams") or 1, setting("num_return_sequences") or 1)
    return Request(ids.to("cpu", torch.int64), rows_, padded, content, given, repeats, drafts or pieces, why), kwargs


def _inferred_mask(ids: torch.Tensor, pad: Any, eos: Any) -> torch.Tensor:
    """As `generate` does without a mask: the padding token is padding, unless it ends texts too."""
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if pad is None or pad in ends or isinstance(pad, torch.Tensor):
        return torch.ones_like(ids)
    return (ids != pad).long()


def _why_not_padded(
    inner: Any,
    cache: KVCache,
    real: torch.Tensor,
    given: dict[str, Any],
    content: dict[str, Any],
    kwargs: dict[str, Any],
    setting: Any,
) -> str | None:
    """Why padding cannot be moved between a prefix and what follows it, or None."""
    if not bool((real.int().diff(dim=1) >= 0).all()) or not bool(real[:, -1].all()):
        return "padding stands elsewhere than on the left"
    plain = all(type(layer) is KVLayer and layer.attached and not layer.is_sliding for layer in cache.layers)
    if not plain or "position_ids" not in inspect.signature(inner.forward).parameters:
        return f"{type(inner).__name__} counts padding between tokens where it stands, so rows must be of one length"
    if content or any(key in given for key in _BY_TOKEN):
        return "inputs beside the ids of padded rows"
    own = [key for key in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn") if kwargs.get(key)]
    own += ["no_repeat_ngram_size"] if setting("no_repeat_ngram_size") else []
    return f"{own[0]} looks at where padding stands" if own else None


def _most(inner: Any, request: Request) -> int:
    """How long a common prefix may be: of all rows, with one token left to compute, and with all images or none."""
    real = request.real
    most = max(0, min(len(ids) for ids in real) - 1)
    for ids in real[1:]:
        most = min(most, common_length(real[0], ids))
    if request.content:
        first, last = placeholders(inner.config, real[0])
        most = most if last <= most else min(most, first)
    return most


def _read_common(
    store: PrefixStore, model: Any, inner: Any, cache: KVCache, request: Request, prefix: torch.Tensor, found: int
) -> int:
    """Compute what several rows (or beams) have in common as one row, and keep it; how many tokens there are then.

    Layers that cannot be cut get an entry of their own where the texts of two calls begin to differ.
    """
    if request.content:
        return found
    targets = []
    if rows.others(cache):
        targets.append(store.matched(model, cache, prefix, request.content))
    # A codec packs what one call has read before the next one: the whole prompt is left to `generate`.
    if len(request.real) > 1 or (request.repeats > 1 and cache.codec is None):
        targets.append(len(prefix))
    for target in targets:
        if target - found >= LEAST:
            read(inner, cache, prefix[None, found:target])
            store.put_row(inner, key_of(inner, cache, {}), prefix[:target], cache, 0)
            found = target
    return found


def _moved(request: Request, found: int) -> dict[str, torch.Tensor]:
    """Ids and mask with the padding of each row behind the common prefix."""
    ids = request.given["input_ids"].clone()
    mask = torch.zeros_like(ids)
    for row, real in enumerate(request.real):
        pad = ids.shape[1] - len(real)
        if pad:
            ids[row, found : found + pad] = request.given["input_ids"][row, 0]
        ids[row, :found] = real[:found].to(ids)
        ids[row, found + pad :] = real[found:].to(ids)
        mask[row, :found] = mask[row, found + pad :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _keep(store: PrefixStore, inner: Any, cache: KVCache, request: Request, sequences: torch.Tensor) -> None:
    """Keep what was computed: of plain sequences with what was generated, of beams the prompt."""
    batch, width = request.ids.shape
    sequences = sequences.to("cpu", torch.int64)
    if rows.seen(cache) >= sequences.shape[1]:
        return  # more was fed than these ids
    whole = not rows.others(cache)
    expected = request.ids.repeat_interleave(len(sequences) // batch, dim=0)
    if not torch.equal(sequences[:, :width], expected) or (not whole and batch * request.repeats > 1):
        return
    try:
        rows.check_whole(cache)
    except ValueError:
        return  # a mask of the caller's own: the rows are not those of the ids alone
    key = key_of(inner, cache, request.content)
    for row in range(batch):
        ids = request.ids[row]
        if request.repeats == 1:
            ids = sequences[row]
            if batch > 1:  # rows that were done early went on with padding
                ids = ids[: width + _until_padding(ids[width:], inner)]
        store.put_row(inner, key, ids, cache, row * request.repeats)


def _until_padding(ids: torch.Tensor, inner: Any) -> int:
    pad = inner.generation_config.pad_token_id
    if pad is None or isinstance(pad, torch.Tensor):
        return 0
    last = (ids != pad).nonzero().flatten()
    return int(last[-1]) + 1 if len(last) else 0
