"""KVCache: one layer object per model layer, and everything a user asks of a cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from . import storage
from .attention import attach, signature_of, why_not_attach
from .codecs import preset
from .codecs.base import Codec, LayerCodec
from .layer import HybridKVLayer, KVLayer
from .offload import Offload, Offloader
from .offload.rules import check_offload, offloaded_bytes
from .paging import BlockPool
from .paging.arena import Kind
from .policies.base import LayerPolicy, Policy
from .segments import OffloadedPackedStore, OffloadedStore, PackedStore, PagedSegment, capacity_for
from .segments.side import half_for, tiles_for

# Of a cache that has seen tokens, and holds none of the layers.
_NOT_OURS = 'every layer is left to transformers (sliding or recurrent); `scope="all"` takes sliding ones too'


class KVCache(DynamicCache):
    """A key/value cache for `generate(past_key_values=...)`: the general form, of which every other class is a preset.

    With no policy it is the identity: lossless, every token kept, in buffers that grow in place; with a model it also
    decodes faster than `DynamicCache`, because each KV head is read once for its whole group of queries.

    Args:
        model_or_config: the model (it is attached, see `attach`) or its config. Policies that drop tokens need the
            model.
        policy: which tokens stay; None keeps all.
        codec: how rows are written beyond the exact window: a `hf_kvcache.codecs.Codec` or the name of one
            (`hf_kvcache.codecs.PRESETS`); None writes full precision. For full-attention layers, and with
            `scope="all"` for sliding ones where the policy keeps all. A policy that overwrites single rows
            (`HeavyHitter`, `SnapKV(decode_budget=...)`) needs a codec of self-contained rows (`Rotated`).
        offload: which rows leave the compute device: a `hf_kvcache.Offload`; None keeps all of them there. For
            full-attention layers, with policies that select from prompts (`SnapKV`) or keep all, and with any codec.
        sharing: which layers read the rows of an earlier one instead of having their own: a factor, a map
            `{follower: source}`, or what `find_sharing` returned; see `CrossLayerSharedCache`.
        scope: `"full"` replaces full-attention layers only and leaves sliding, chunked, linear and convolution layers
            to transformers; `"all"` replaces sliding and chunked attention layers too.
        pool: a `BlockPool` that rows are drawn from, a block at a time; several caches may draw from one. Reordering
            beams, repeating a batch and copying the cache then copy block tables and no rows. None: buffers of its own.

    Raises:
        ValueError: encoder-only models, impossible arguments, a config where a model is needed.
        NotImplementedError: models that the technique cannot serve, with the reason.
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        policy: Policy | None = None,
        codec: Any = None,
        offload: Any = None,
        sharing: Any = None,
        scope: str = "full",
        pool: BlockPool | None = None,
    ) -> None:
        if offload is not None and not isinstance(offload, Offload):
            raise ValueError(f"`offload` must be a hf_kvcache.Offload, got {type(offload).__name__}")
        if scope not in ("full", "all"):
            raise ValueError(f"`scope` must be 'full' or 'all', got {scope!r}")
        policy = policy if policy is not None else Policy()
        if not isinstance(policy, Policy):
            raise ValueError(f"`policy` must be a hf_kvcache.policies.Policy, got {type(policy).__name__}")
        if isinstance(codec, str):
            codec = preset(codec)
        if codec is not None and not isinstance(codec, Codec):
            raise ValueError(f"`codec` must be a hf_kvcache.codecs.Codec, got {type(codec).__name__}")
        if pool is not None and not isinstance(pool, BlockPool):
            raise ValueError(f"`pool` must be a hf_kvcache.BlockPool, got {type(pool).__name__}")
        model, config = _model_and_config(model_or_config)
        decoder = config.get_text_config(decoder=True)
        technique = type(self).__name__
        if pool is not None and codec is not None:
            raise NotImplementedError(
                f"{technique}: a block of a pool holds rows in full precision, and a codec writes rows of a padded "
                "batch at places of their own. Leave `pool` or `codec` out."
            )
        if pool is not None and offload is not None:
            raise NotImplementedError(
                f"{technique}: blocks of a pool stay on the device that they were made on. Leave `pool` or `offload` "
                "out."
            )
        _check_config(config, decoder, technique)
        reason = None if model is None else own_cache_reason(model)
        if reason is not None:
            raise NotImplementedError(f"{technique} does not fit {type(model).__name__}: {reason}")
        if policy.needs_model and model is None:
            raise ValueError(
                f"{technique} needs the model itself, not only its config, because it takes part in attention: "
                f"{technique}(model, ...)"
            )
        obstacle = None if model is None else why_not_attach(model)
        attached = model is not None and obstacle is None
        if policy.drops and not attached:
            raise NotImplementedError(
                f"{technique} drops tokens, but {obstacle} and cannot be told which tokens are left. Use KVCache, "
                "which keeps every token."
            )
        if model is not None:
            policy = policy.prepare(model)
        expanded = model is not None and any(hasattr(m, "expand_kv") for m in model.modules())
        self.policy = policy
        self.codec = codec
        self.offload = offload
        self.scope = scope
        self.pool = pool
        self.config_signature = signature_of(decoder)
        layers = []
        replaced = coded = 0
        native = DynamicCache(config=config).layers
        self.offloader: Offloader | None = None
        if offload is not None:
            full = [index for index, layer in enumerate(native) if _is_full(layer)]
            check_offload(offload, policy, codec, full, len(native), attached and not expanded, technique)
            self.offloader = Offloader.of(offload, len(full))
        kinds = getattr(decoder, "layer_types", None) or []
        for index, layer in enumerate(native):
            chunked = index < len(kinds) and kinds[index] == "chunked_attention"
            chunked = chunked or (not kinds and getattr(decoder, "attention_chunk_size", None) is not None)
            made = _replace_layer(
                layer,
                index,
                len(native),
                policy,
                codec,
                scope,
                chunked,
                attached,
                technique,
                expanded,
                pool,
                self.offloader,
            )
            if made is not None:
                _check_drops(made.policy, policy)
                made.signature = self.config_signature
                replaced += 1
                coded += isinstance(made.segments, PackedStore) or (made.is_sliding and not policy.drops)
            layers.append(layer if made is None else made)
        if policy.drops and not replaced:
            names = sorted({type(layer).__name__ for layer in native})
            fix = " Use scope='all'." if any(_window_of(layer) for layer in native) and scope == "full" else ""
            raise NotImplementedError(
                f"{technique} would change nothing: this model has no full-attention layer (its layers: "
                f"{', '.join(names)}).{fix}"
            )
        if codec is not None and not coded:
            raise NotImplementedError(
                f"{technique}: no layer of this model takes the codec (full-attention layers do, and sliding ones with "
                "`scope='all'` and a policy that keeps every token). Leave it None."
            )
        if codec is not None and codec.for_latents and getattr(decoder, "kv_lora_rank", None) is None:
            raise ValueError(
                f"{type(codec).__name__} writes the latents of multi-head latent attention, and this model has none: "
                "use hf_kvcache.codecs.Rotated"
            )
        if codec is not None:
            _check_sizes(codec, policy, decoder, layers)
        self.sharing = None if sharing is None else _share(sharing, layers, model, config, scope)
        if self.offloader is not None and self.sharing:
            self.offloader.layers -= sum(_is_full(native[follower]) for follower in self.sharing)
        Cache.__init__(self, layers=layers)
        if model is not None and attached and replaced:
            attach(model)
        self.fingerprint = storage.fingerprint(model) if model is not None else None

    # ------------------------------------------------------------------ what it holds

    @property
    def kv_layers(self) -> list[KVLayer]:
        """The layers that this library holds; the others are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held, of every layer and in every tier: keys, values, positions, scores and slack."""
        own = sum(layer.nbytes if isinstance(layer, KVLayer) else _native_nbytes(layer) for layer in self.layers)
        own += sum(layer.state_nbytes for layer in self.layers if isinstance(layer, HybridKVLayer))
        return own + (0 if self.offloader is None else self.offloader.nbytes)

    def nbytes_by_tier(self) -> dict[str, int]:
        """`nbytes` by where it is: `"device"` (staging buffers included), `"host"` and `"disk"`."""
        total = {"device": self.nbytes, "host": 0, "disk": 0}
        for layer in self.kv_layers:
            if isinstance(layer.segments, OffloadedStore | OffloadedPackedStore):
                tiers = layer.segments.tier_bytes()
                for tier in ("host", "disk"):
                    total[tier] += tiers[tier]
                    total["device"] -= tiers[tier]
        return total

    def _holder(self, layer_idx: int) -> Any:
        """The layer that holds the rows which model layer `layer_idx` reads."""
        return self.layers[(self.sharing or {}).get(layer_idx, layer_idx)]

    def kept_length(self, layer_idx: int = 0) -> int:
        """Rows (tokens) physically held per KV head by layer `layer_idx`."""
        layer = self._holder(layer_idx)
        if isinstance(layer, KVLayer):
            return layer.kept
        keys = getattr(layer, "keys", None)
        return 0 if keys is None or keys.ndim < 3 else keys.shape[-2]

    def kept_positions(self, layer_idx: int = 0) -> torch.Tensor:
        """Sequence positions of the rows held by layer `layer_idx`: int32 `[B, Hkv, kept]`, ascending, -1 for padding.

        Raises `ValueError` for a layer that is left to transformers.
        """
        layer = self._holder(layer_idx)
        if not isinstance(layer, KVLayer):
            raise ValueError(f"layer {layer_idx} is transformers' own {type(layer).__name__}; see `cache.kv_layers`")
        return layer.kept_positions()

    def expected_bytes(
        self,
        config: PreTrainedConfig,
        batch: int,
        tokens: int,
        dtype: torch.dtype | None = None,
        shapes: Mapping[int, tuple[int, int, int]] | None = None,
    ) -> int:
        """The formula behind `nbytes`: bytes of this cache after one prompt of `tokens` tokens in a batch of `batch`.

        Counts the layers that this library holds (all, on a full-attention model). Exact, except for `adaptive_heads`
        with a batch of several rows, where a head is as long as its longest row (a lower bound), and for sliding layers
        with a codec (an upper bound). `shapes` gives KV heads, key size and value size by layer, for models whose
        config does not say them.
        """
        decoder = config.get_text_config(decoder=True)
        dtype = dtype or getattr(decoder, "dtype", None) or torch.float32
        by_layer = _by_layer(decoder, len(self.layers))
        total = 0
        for layer in self.kv_layers:
            shape = (shapes or {}).get(layer.layer_idx) or _row_shape(by_layer[layer.layer_idx])
            heads, key_dim, value_dim = shape
            if isinstance(layer.segments, PackedStore):
                total += self._packed_bytes(layer, shape, batch, tokens, dtype)
                continue
            if isinstance(layer.segments, PagedSegment):
                total += _paged_bytes(layer, layer.segments.pool, heads, key_dim, value_dim, batch, tokens, dtype)
                continue
            if isinstance(layer.segments, OffloadedStore):
                total += offloaded_bytes(layer, heads, key_dim, value_dim, batch, tokens, dtype)
                continue
            rows = layer.policy.rows_after(tokens)
            per_head = (key_dim + value_dim) * dtype.itemsize + (4 if layer.policy.uses_scores else 0)
            dropped = rows < capacity_for(tokens)
            by_head = layer.policy.ragged or (layer.policy.per_head_positions and dropped)
            position_heads = heads if by_head else 1
            total += batch * (rows * (heads * per_head + position_heads * 4) + layer.policy.state_bytes)
        return total

    def _packed_bytes(
        self, layer: KVLayer, shape: tuple[int, int, int], batch: int, tokens: int, dtype: torch.dtype
    ) -> int:
        """`expected_bytes` of one layer with a codec."""
        heads, key_dim, value_dim = shape
        policy = layer.policy
        codec = layer_codec(self.codec, policy, layer.layer_idx, len(self.layers), key_dim, value_dim)
        kept = policy.kept_after(tokens)
        own = heads if policy.per_head_positions and kept < tokens else 1
        packed = codec.packed_after(kept)
        exact = heads * (key_dim + value_dim) * dtype.itemsize
        meta = own * 4 + (heads * 4 if policy.uses_scores else 0)
        if not packed:
            rows = capacity_for(tokens) if kept == tokens else kept + policy.reserve
            return batch * (rows * (exact + meta) + policy.state_bytes)
        half = half_for(torch.device("cpu"))
        tiles = tiles_for(packed, half)
        rows = kept - packed + max(policy.reserve, codec.block)
        total = codec.packed_bytes(batch, heads, key_dim, value_dim, tiles, half)
        return total + batch * (rows * (exact + meta) + tiles * 2 * half * meta + policy.state_bytes)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens ever given (not the rows held): positions come from it."""
        return super().get_seq_length(layer_idx)

    def __repr__(self) -> str:
        layers = self.kv_layers
        name = type(self).__name__
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.policy.describe().items() if v is not None)
        seen = self._seen()
        if type(self.policy) is not Policy and name == "KVCache":
            arguments = f"policy={type(self.policy).__name__}({arguments})"
        if self.codec is not None:
            inner = ", ".join(f"{k}={v!r}" for k, v in self.codec.describe().items() if v is not None)
            plain = name == "QuantizedKIVICache" and not arguments
            arguments = inner if plain else f"{arguments}, codec={type(self.codec).__name__}({inner})".lstrip(", ")
        if self.sharing:
            arguments = f"{arguments}, sharing={self.sharing}".lstrip(", ")
        if self.offload is not None:
            arguments = f"{arguments}, resident_length={self.offload.resident_length}".lstrip(", ")
        if not layers and self.get_seq_length():
            return f"{name}({arguments}): seen {self.get_seq_length()} tokens; {_NOT_OURS}"
        if not layers or seen == 0:
            return f"{name}({arguments}): empty"
        if len({layer.get_seq_length() for layer in layers}) > 1:
            return f"{name}({arguments}): left half-way by a forward pass that was interrupted; call reset()"
        kept = [layer.kept for layer in layers]
        span = f"{kept[0]}" if min(kept) == max(kept) else f"{min(kept)}-{max(kept)}"
        shapes = [layer.segments.shape for layer in layers]
        size = layers[0].element_size
        readers = [1 + layer.followers for layer in layers]
        rows = zip(readers, shapes, strict=True)
        full = seen * size * sum(count * batch * heads * (key + value) for count, (batch, heads, key, value) in rows)
        own = sum(layer.nbytes for layer in layers)
        text = (
            f"{name}({arguments}): seen {seen} tokens, kept {span} rows per KV head, "
            f"{self._bits()} bits per element, {self.nbytes:,} bytes, "
            f"{own / max(full, 1):.3f} of full precision"
        )
        if self.sharing:
            text += f", {sum(readers)} layers reading {len(layers)}"
        others = len(self.layers) - sum(readers)
        text += f" in {len(layers)} layers ({others} left to transformers)" if others else ""
        if self.offloader is None:
            return text
        return text + "; " + ", ".join(f"{tier} {size:,}" for tier, size in self.nbytes_by_tier().items())

    def _bits(self) -> str:
        """Bits of an element: of packed rows and of exact ones."""
        layers = self.kv_layers
        exact = layers[0].element_size * 8
        packed = [layer.segments for layer in layers if isinstance(layer.segments, PackedStore)]
        packed = [store for store in packed if store.packs]
        if not packed:
            return f"{exact}"
        widths = [store.codec.bits_per_element(*store.shape[2:]) for store in packed]
        return f"{sum(widths) / len(widths):.2f} ({exact} in exact rows)"

    def arguments(self) -> dict[str, Any]:
        """The arguments of this class, JSON-able, without the codec's (which `self.codec` describes)."""
        return self.policy.describe()

    @property
    def stored_as(self) -> str:
        """The class that a file names. Files do not say where rows lay, so that any machine can read them."""
        return type(self).__name__

    def _seen(self) -> int:
        return max((layer.get_seq_length() for layer in self.kv_layers), default=0)

    def __bool__(self) -> bool:
        return True

    # ------------------------------------------------------------------ operations

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache was made for a model of {len(self.layers)} layers but is used with one that has more: "
                "make a cache for each model"
            )
        layer = self.layers[layer_idx]
        handles = layer.update(key_states, value_states, *args, **kwargs)
        if isinstance(layer, KVLayer):
            first = next(other for other in self.layers if isinstance(other, KVLayer))
            if layer.get_seq_length() != first.get_seq_length():
                raise ValueError(
                    f"layer {layer_idx} was given {layer.get_seq_length()} tokens where layer {first.layer_idx} was "
                    f"given {first.get_seq_length()}: a forward pass was interrupted half-way. Call `cache.reset()`."
                )
        return handles

    def reset(self) -> None:
        """Forget everything; the cache can be used for another prompt, of another batch size too."""
        super().reset()
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                _forget_states(layer)
            if isinstance(layer, DynamicLayer):  # transformers 5.17 keeps zeroed keys of the old batch
                layer.keys = layer.values = None
                layer.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        # Block tables are kept on the CPU: one copy of the indices serves all layers.
        super().reorder_cache(beam_idx if self.pool is None else beam_idx.cpu())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, in every layer or (`ValueError`) in none.

        A positive number is the length to keep, as in older transformers.
        """
        for layer in self.kv_layers:
            layer.check_crop(tokens_to_remove)
        # transformers' own layers refuse before they change anything, and all for the same reason.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, KVLayer)):
            try:
                layer.crop(tokens_to_remove)
            except RuntimeError as error:
                if isinstance(layer, KVLayer):
                    raise
                raise ValueError(
                    f"a layer that is left to transformers cannot be rolled back now ({error}). Call "
                    "`cache.activate_past_recording()` before the step that may be undone, or use scope='all'."
                ) from error

    def seal(self) -> None:
        """Make everything held so far read-only, so that copies of this cache share it instead of copying it.

        A prompt read once can then be continued many times: `cache.seal()`, and `copy.deepcopy(cache)` for each
        continuation costs no bytes for the prompt. Lossless (of a codec: everything but its exact tail is shared, as it
        is packed). Raises `ValueError` for caches that drop tokens.
        """
        for layer in self.kv_layers:
            layer.seal()

    def save(self, path: str) -> None:
        """Write the cache to one safetensors file, with checksums and the fingerprint of its model.

        Raises `NotImplementedError` for layer kinds that have no stored form.
        """
        storage.save(self, path)

    def plot_kept(self, path: str, batch_row: int = 0) -> None:
        """Write a PNG of which positions each layer and KV head still holds (see `hf_kvcache.pictures`).

        Raises `ImportError` without matplotlib, and `ValueError` for an empty cache.
        """
        from .pictures import plot_kept

        plot_kept(self, path, batch_row)

    def load(self, path: str) -> KVCache:
        """Read a file written by `save` into this cache (of the same technique and arguments, for the same model).

        Everything is verified before anything is changed. Raises `ValueError` saying what is wrong with the file.
        """
        storage.load_into(self, path)
        return self


def load(path: str, model: PreTrainedModel) -> KVCache:
    """A cache from a file written by `cache.save(path)`, for the same model.

    Raises `ValueError` for a file that is truncated, altered, of another model, or not safetensors.
    """
    return storage.load(path, model)


def _model_and_config(model_or_config: Any) -> tuple[PreTrainedModel | None, PreTrainedConfig]:
    if isinstance(model_or_config, PreTrainedConfig):
        return None, model_or_config
    model = model_or_config
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        # PEFT and torch.compile wrap the model; what is attached is the model inside.
        for attribute in ("get_base_model", "_orig_mod", "module"):
            inner = getattr(model, attribute, None)
            inner = inner() if attribute == "get_base_model" and callable(inner) else inner
            if isinstance(inner, PreTrainedModel):
                return inner, inner.config
    if isinstance(model, PreTrainedModel):
        return model, model.config
    raise ValueError(f"expected a transformers model or config, got {type(model_or_config).__name__}")


def own_cache_reason(model: PreTrainedModel) -> str | None:
    """Why this model keeps no keys and values in a cache that is passed to it, or None where it does."""
    supported = getattr(model, "_supports_default_dynamic_cache", None)
    if supported is not None and not supported():
        return "the model class declares that it does not support DynamicCache"
    parameters = inspect.signature(type(model).forward).parameters
    if not any(name in parameters for name in ("cache", "past_key_values")):
        other = [name for name in ("cache_params", "mems", "state", "shared_kv_states") if name in parameters]
        return f"its forward takes {other[0]} instead of a KV cache" if other else "its forward takes no cache"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return "every layer keeps a recurrent state, none keeps keys and values"
    return None


def _check_config(config: PreTrainedConfig, decoder: PreTrainedConfig, technique: str) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    generators = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    generates = config.is_encoder_decoder or any(config.model_type in names for names in generators)
    encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_encoder_decoder
    if encoder and (not generates or getattr(config, "is_decoder", None) is False):
        raise ValueError(
            f"{technique}: '{config.model_type}' is an encoder-only model (config.is_decoder is False), which has no "
            "key/value cache. Set `config.is_decoder=True` before building the model if it is meant to decode."
        )
    if getattr(decoder, "num_hidden_layers", None) is None:
        raise ValueError(f"{technique}: the config of '{config.model_type}' names no `num_hidden_layers`")


def _is_full(layer: Any) -> bool:
    return type(layer) is DynamicLayer or type(layer) is LinearAttentionAndFullAttentionLayer


def _window_of(layer: Any) -> int | None:
    return layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None


def _replace_layer(
    layer: Any,
    index: int,
    count: int,
    policy: Policy,
    codec: Codec | None,
    scope: str,
    chunked: bool,
    attached: bool,
    technique: str,
    expanded: bool,
    pool: BlockPool | None,
    offloader: Offloader | None,
) -> KVLayer | None:
    """Our layer in place of transformers' `layer`, or None where it is left as it is."""
    arguments: dict[str, Any] = dict(layer_idx=index, attached=attached, technique=technique, expanded=expanded)
    arguments["pool"] = pool
    if _is_full(layer):
        arguments["offloader"] = offloader
        of_layer = policy.for_layer(index, count, None)
        _check_pool(pool, of_layer, technique)
        if codec is not None:
            _check_codec(codec, of_layer, technique)
            arguments["codec"] = partial(layer_codec, codec, of_layer, index, count)
        if type(layer) is LinearAttentionAndFullAttentionLayer:
            return HybridKVLayer(of_layer, number_of_states=layer.number_of_states, **arguments)
        return KVLayer(of_layer, **arguments)
    window = _window_of(layer)
    if scope == "all" and window is not None and attached:
        # Both kinds hold rows alike; they differ in what a query sees.
        limit: dict[str, Any] = {"chunk_size": window} if chunked else {"sliding_window": window}
        of_layer = policy.for_layer(index, count, window)
        _check_pool(pool, of_layer, technique)
        # Where all that a query sees is within the exact window, there is nothing to pack.
        if codec is not None and not chunked and not policy.drops and window > codec.residual_length:
            arguments["codec"] = partial(layer_codec, codec, of_layer, index, count)
        return KVLayer(of_layer, **limit, **arguments)
    return None


def layer_codec(
    codec: Codec | None, policy: LayerPolicy, layer: int, layers: int, key_dim: int, value_dim: int
) -> LayerCodec:
    """The codec of one layer, with the exact window and sinks that its policy asks for."""
    assert codec is not None
    made = codec.for_layer(layer, layers, key_dim, value_dim)
    if policy.fifo_window is not None:
        made = replace(made, num_sink_tokens=policy.num_sink_tokens)
    bound = policy.most_rows
    if bound is not None and not made.packed_after(bound + 1):
        raise ValueError(
            f"{type(codec).__name__} would pack nothing: at most {bound} rows are held, of which the first "
            f"{made.num_sink_tokens} and the last {made.residual_length} stay exact, and {made.block} are packed at "
            "once. Lower its `residual_length`, or raise the budget."
        )
    return made


def _check_pool(pool: BlockPool | None, policy: LayerPolicy, technique: str) -> None:
    if pool is None:
        return
    if policy.ragged:
        raise NotImplementedError(
            f"{technique}: `adaptive_heads` gives each head a length of its own, and a block of a pool holds the same "
            "places of all heads. Leave one of them out."
        )
    if policy.overwrites or policy.uses_scores:
        raise NotImplementedError(
            f"{technique} gives a place of each head to a new row at every step, so every block of a pool would soon "
            "be written, and none shared. Leave `pool` out, or use a policy that selects rows once (SnapKV without "
            "`decode_budget`), a window, or none."
        )


def _paged_bytes(
    layer: KVLayer,
    pool: BlockPool,
    heads: int,
    key_dim: int,
    value_dim: int,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
) -> int:
    """`expected_bytes` of one layer that draws from a pool."""
    policy = layer.policy
    kept = policy.kept_after(tokens)
    window = layer.sliding_window or layer.chunk_size
    if not policy.drops and window is not None and tokens >= window + max(window, 32):
        kept = window
    own = heads if policy.per_head_positions and kept < tokens else 1
    kind = Kind(layer.layer_idx, heads, key_dim, value_dim, dtype, dtype, torch.device("cpu"), own)
    blocks = -(-kept // pool.block_size)
    return batch * (blocks * (kind.block_bytes(pool.block_size) + 4) + policy.state_bytes)


def _check_codec(codec: Codec, policy: LayerPolicy, technique: str) -> None:
    if policy.ragged:
        raise NotImplementedError(
            f"{technique}: `adaptive_heads` gives each head a length of its own, and a codec packs all heads alike. "
            "Leave one of them out."
        )
    if policy.overwrites and not codec.per_token:
        raise NotImplementedError(
            f"{technique} gives the place of single rows to new ones, but {type(codec).__name__} writes keys in groups "
            "of tokens. Use a codec whose rows are complete in themselves: hf_kvcache.codecs.Rotated."
        )


def _share(sharing: Any, layers: list[Any], model: Any, config: PreTrainedConfig, scope: str) -> dict[int, int]:
    """The map follower -> source, once followers have taken the place of layers in `layers`."""
    from .sharing import FollowerLayer, groups

    kinds = groups.layer_kinds(config, scope)
    for index, layer in enumerate(layers):
        if not isinstance(layer, KVLayer) and not isinstance(kinds[index], str):
            kinds[index] = "it has a window and this model is not attached, so it is left to transformers"
    found = groups.resolve(sharing, kinds, config)
    if model is not None:
        groups.check_devices(found, storage.layer_devices(model, len(layers)))
    for follower, source in found.items():
        layers[follower] = FollowerLayer(layers[source], follower)
    return found


def _check_sizes(codec: Codec, policy: Policy, decoder: PreTrainedConfig, layers: list[Any]) -> None:
    """Refuse sizes that cannot be packed, where the config names them."""
    by_layer = _by_layer(decoder, len(layers))
    for index, layer in enumerate(layers):
        if isinstance(layer, KVLayer) and isinstance(layer.segments, PackedStore):
            try:
                _, key_dim, value_dim = _row_shape(by_layer[index])
            except (AttributeError, TypeError, RuntimeError):
                continue  # found out with the first tokens
            layer_codec(codec, layer.policy, index, len(layers), key_dim, value_dim)


def _check_drops(of_layer: LayerPolicy, policy: Policy) -> None:
    silent = type(of_layer).keep is not LayerPolicy.keep and not of_layer.drops
    if silent or of_layer.drops != policy.drops:
        raise ValueError(
            f"{type(of_layer).__name__}.drops is {of_layer.drops} and {type(policy).__name__}.drops is "
            f"{policy.drops}: a policy that drops rows must set `drops = True` in both classes"
        )


def _native_nbytes(layer: Any) -> int:
    """Bytes of all tensors of a layer of transformers' own, each storage once."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage_ = value.untyped_storage()
            seen[storage_.data_ptr()] = storage_.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for name, value in vars(layer).items():
        if not name.startswith("_"):
            visit(value)
    return sum(seen.values())


def _forget_states(layer: LinearAttentionCacheLayerMixin) -> None:
    """Drop states that transformers' `reset` only zeroes, at the shape of the old batch."""
    for index in range(layer.number_of_states):
        layer.conv_states[index] = layer.recurrent_states[index] = None
        layer.is_conv_states_initialized[index] = layer.is_recurrent_states_initialized[index] = False
        layer.conv_kernel_size[index] = None
    layer.record_past = False


def _by_layer(config: Any, layers: int) -> list[Any]:
    """A config for each layer, where they differ in size."""
    converted = getattr(config, "mla", None)  # see `hf_kvcache.mla.convert_to_mla`
    if isinstance(converted, list):
        by_layer = [config] * layers
        for entry in converted:
            by_layer[entry["layer_idx"]] = SimpleNamespace(**entry)
        return by_layer
    return getattr(config, "per_layer_config", None) or [config] * layers


def _row_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(KV heads, key size, value size) of one cached row."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None and getattr(config, "qk_rope_head_dim", None) is not None:
        return 1, rank, config.qk_rope_head_dim
    query_heads = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1  # Falcon and GPT-BigCode say it this way
    dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return heads, dim, dim


__all__ = ["KVCache", "load"]
