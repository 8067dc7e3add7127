"""Layers that share keys and values, without the projections they no longer need, and in training too.

For: transformers 5.17 to 5.24 (any version whose attention modules have `q_proj`, `k_proj`, `v_proj` and hand their
keys to `cache.update`).
Stands in for: cross-layer sharing in modelling files that were not written for it. `CrossLayerSharedCache` alone makes
followers attend over their source's rows, but the model still computes the keys and values that nobody reads, and a
pass without a cache (training, perplexity) shares nothing.
Can go: when transformers lets a config say which layers share, as Gemma 3n and Gemma 4 do for themselves.

While the patch is applied a follower's `k_proj`, `v_proj` and `k_norm` are not computed, and what its attention gets is
what the source got: from a `CrossLayerSharedCache` of the same map, from a `DynamicCache` (which then holds the sources
only), or in a pass without a cache, where gradients flow into the source's projections. Weights, names and hooks of the
model are as before once it is undone.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvcache.cache import KVCache, _model_and_config
from hf_kvcache.sharing import layer_kinds, resolve

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
MARK = "_hf_kvcache_shares"


@contextmanager
def shared_layers(model: Any, sharing: Any, scope: str = "full") -> Iterator[dict[int, int]]:
    """`apply`, undone on exit; gives the map follower -> source."""
    undo = apply(model, sharing, scope)
    try:
        yield resolve_for(model, sharing, scope)
    finally:
        undo()


def apply(model: Any, sharing: Any, scope: str = "full") -> Callable[[], None]:
    """Make layers of `model` (wrapped by PEFT or not) share, and return the function that undoes it.

    Args:
        sharing, scope: as in `CrossLayerSharedCache`.

    Raises:
        ValueError: a map that does not fit the model; a model that is patched already.
        NotImplementedError: models whose attention has no projections of this kind, or has them joined in one.
    """
    base, _ = _model_and_config(model)
    if base is None:
        raise ValueError("the patch needs the model itself, not only its config")
    found = resolve_for(model, sharing, scope)
    modules = _attention_modules(base, found)
    patch = _Patch(base, found, modules)
    try:
        patch.install(narrow=True)
        if patch.probe() is not None:
            patch.undo()
            patch.install(narrow=False)
            error = patch.probe()
            if error is not None:
                raise NotImplementedError(f"{type(base).__name__} does not run with layers that share: {error}")
    except BaseException:
        patch.undo()
        raise
    return patch.undo


def resolve_for(model: Any, sharing: Any, scope: str = "full") -> dict[int, int]:
    """The map follower -> source that `sharing` means for this model."""
    _, config = _model_and_config(model)
    return resolve(sharing, layer_kinds(config, scope), config)


def _attention_modules(model: PreTrainedModel, found: dict[int, int]) -> dict[int, nn.Module]:
    """The attention module of each layer that takes part."""
    wanted = {*found, *found.values()}
    modules: dict[int, nn.Module] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if index in wanted and all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS):
            if index in modules:
                raise NotImplementedError(f"{type(model).__name__} has two attention modules in layer {index}")
            if hasattr(module, MARK):
                raise ValueError("this model shares layers already: undo that first")
            modules[index] = module
    if wanted - set(modules):
        raise NotImplementedError(
            f"{type(model).__name__} has no separate {', '.join(PROJECTIONS)} in layers "
            f"{sorted(wanted - set(modules))}, so nothing can be left out there. CrossLayerSharedCache works as it is."
        )
    return modules


def _cache_argument(module: nn.Module) -> tuple[str, int]:
    """Name and place of the argument that takes the cache."""
    parameters = list(inspect.signature(module.forward).parameters)
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name, parameters.index(name)
    raise NotImplementedError(f"{type(module).__name__} takes no cache, so it cannot be given keys of another layer")


class _Pass(threading.local):
    """What is passed on during one forward pass."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Any, Any]] = {}  # what the attention of each source was given
        self.starts: dict[int, int] = {}  # tokens in the cache before it


class _Patch:
    """What is changed on one model, and how to change it back."""

    def __init__(self, model: PreTrainedModel, found: dict[int, int], modules: dict[int, nn.Module]) -> None:
        self.model, self.found, self.modules = model, found, modules
        self.last = {source: follower for follower, source in found.items()}  # the last reader of each source
        self.first = min(found.values())
        self.arguments = {index: _cache_argument(module) for index, module in modules.items()}
        self.now = _Pass()
        self.read: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    def install(self, narrow: bool) -> None:
        """Put hooks on attention modules, and stand-ins for the projections of followers.

        `narrow`: they give one head instead of all, so that what follows (norm, rotation) has less to do.
        """
        for index, module in self.modules.items():
            hook = module.register_forward_pre_hook(partial(self._before, index), with_kwargs=True)
            after = module.register_forward_hook(partial(self._after, index), always_call=True)
            setattr(module, MARK, True)
            self._undo += [hook.remove, after.remove, partial(delattr, module, MARK)]
            if index not in self.found:
                continue
            for name in ("k_proj", "v_proj"):
                projection = getattr(module, name)
                self._replace(projection, partial(_nothing, _width(projection, module if narrow else None)))
            norm = getattr(module, "k_norm", None)
            if isinstance(norm, nn.Module):
                self._replace(norm, lambda states, *args, **kwargs: states)

    def _replace(self, module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        held = vars(module)
        before = held.get("forward")  # accelerate puts one there
        module.forward = forward  # type: ignore[method-assign]
        if before is None:
            self._undo.append(partial(held.pop, "forward"))
        else:
            self._undo.append(partial(setattr, module, "forward", before))

    def undo(self) -> None:
        """Bring everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self.now.rows.clear()

    @torch.no_grad()
    def probe(self) -> Exception | None:
        """Why a pass over one token fails, or None."""
        self.read.clear()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        try:
            with torch.random.fork_rng(devices=[]):  # dropout of a model in training
                self.model(input_ids=ids, use_cache=False)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return error
        missing = sorted(set(self.found) - self.read)
        return RuntimeError(f"layers {missing} do not ask the cache for keys") if missing else None

    def _before(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the attention module a cache that hands it what its source was given."""
        if module.training and self.model.is_gradient_checkpointing:
            raise NotImplementedError(
                "gradient checkpointing computes one layer at a time again, without the keys of its source: call "
                "`model.gradient_checkpointing_disable()` before sharing layers"
            )
        name, place = self.arguments[index]
        cache = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(cache, KVCache):
            if index == self.first:
                self._check(cache)
            return None
        if cache is not None and type(cache) is not DynamicCache:
            raise NotImplementedError(
                f"the layers of this model share keys and values, which {type(cache).__name__} knows nothing of. Pass "
                f"CrossLayerSharedCache(model, sharing={self.found}), or undo the patch."
            )
        relay = _Relay(self, cache)
        if place < len(args):
            return (*args[:place], relay, *args[place + 1 :]), kwargs
        return args, kwargs | {name: relay}

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        source = self.found.get(index)
        if source is not None and self.last[source] == index:
            self.now.rows.pop(source, None)  # nobody reads it any more in this pass

    def _check(self, cache: KVCache) -> None:
        mine = cache.sharing or {}
        if any(mine.get(follower) != source for follower, source in self.found.items()):
            raise ValueError(
                f"the layers of this model share keys and values by the map {self.found}, but this "
                f"{type(cache).__name__} was made with sharing={cache.sharing}: make it with that map, or undo the "
                "patch"
            )


class _Relay:
    """Stands in for the cache (or for none) while one attention module runs."""

    def __init__(self, patch: _Patch, cache: DynamicCache | None) -> None:
        self.patch, self.cache = patch, cache

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        patch, now = self.patch, self.patch.now
        if layer_idx in patch.found:
            patch.read.add(layer_idx)
            rows = now.rows[patch.found[layer_idx]]
            if self.cache is not None and layer_idx < len(self.cache.layers):
                layer: Any = self.cache.layers[layer_idx]
                if layer.keys is None:  # some versions crop a layer that has never been filled
                    layer.keys, layer.values = (t.new_zeros(*t.shape[:2], 0, t.shape[3]) for t in rows)
            return rows
        now.starts[layer_idx] = self.get_seq_length(layer_idx)
        rows = (keys, values) if self.cache is None else self.cache.update(keys, values, layer_idx, *args, **kwargs)
        now.rows[layer_idx] = rows
        return rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if layer_idx in self.patch.found:
            return self.patch.now.starts[self.patch.found[layer_idx]]
        return 0 if self.cache is None else self.cache.get_seq_length(layer_idx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def _width(projection: nn.Module, module: nn.Module | None) -> int:
    """How wide the stand-in for a projection is: one head of `module`, or as wide as the projection."""
    full = getattr(projection, "out_features", None)
    if full is None:
        raise NotImplementedError(f"a projection of kind {type(projection).__name__} cannot be left out")
    head = None if module is None else getattr(module, "head_dim", None)
    return head if isinstance(head, int) and full % head == 0 else full


def _nothing(width: int, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Zeros `[B, S, width]` in place of keys or values that nobody reads."""
    return states.new_zeros(*states.shape[:-1], width)


__all__ = ["apply", "shared_layers"]
