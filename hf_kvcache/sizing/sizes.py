"""What a model's config says about bytes: weights, and the rows and states that each layer caches for a token.

Nothing is downloaded but the config. The model is built on the meta device, where tensors have shapes and no storage,
and four tokens go through it with transformers' own `DynamicCache`: what the layers then hold is read off, whatever the
family calls its heads. So hybrid, sliding, latent (MLA), shared and recurrent layers are counted by what they do.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..cache import KVCache, _by_layer, _row_shape, own_cache_reason
from ..layer import KVLayer
from ..sharing import FollowerLayer
from .presets import PRESETS, preset_config

_TOKENS = 4
Shape = tuple[int, int, int]  # KV heads, key size, value size


@dataclass(frozen=True)
class LayerSizes:
    """What one layer caches.

    Attributes:
        kind: transformers' layer class.
        shape: KV heads, key size and value size of a row; None where there are no rows.
        window: the layer's own sliding window or chunk, in tokens.
        more: elements of a token that are kept beside its row (keys of an indexer).
        states: elements of recurrent and convolution states of a sequence, and how many of them are float32 whatever
            the model's dtype.
    """

    kind: str
    shape: Shape | None
    window: int | None
    more: int
    states: int
    wide_states: int

    def rows(self, tokens: int) -> int:
        """Rows that transformers' layer holds when `tokens` were seen and the next one is to come."""
        return min(tokens, self.window) if self.window is not None else tokens

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the states of a sequence."""
        return self.states * dtype.itemsize + self.wide_states * max(4, dtype.itemsize)

    def native_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of a sequence in transformers' own layer, states not included."""
        heads, key_dim, value_dim = self.shape or (0, 0, 0)
        return self.rows(tokens) * (heads * (key_dim + value_dim) + self.more) * dtype.itemsize


@dataclass(frozen=True)
class ModelSizes:
    """A model on the meta device and what it caches; see `measure_sizes`."""

    name: str
    model: PreTrainedModel
    config: PreTrainedConfig
    dtype: torch.dtype
    parameters: int
    layers: list[LayerSizes]

    @property
    def decoder(self) -> Any:
        return self.config.get_text_config(decoder=True)

    @property
    def shapes(self) -> dict[int, Shape]:
        return {index: layer.shape or (0, 0, 0) for index, layer in enumerate(self.layers)}

    @property
    def trained_length(self) -> int | None:
        """Tokens that the config says the model was made for."""
        found = getattr(self.decoder, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def native_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of transformers' `DynamicCache`."""
        size = self.dtype
        return batch * sum(layer.native_bytes(tokens, size) + layer.state_bytes(size) for layer in self.layers)

    def bytes_of(self, cache: KVCache, batch: int, tokens: int) -> int:
        """Bytes of one of this library's caches: its own formula, and the layers that it leaves to transformers."""
        total = cache.expected_bytes(self.config, batch, tokens, self.dtype, self.shapes)
        for sizes, layer in zip(self.layers, cache.layers, strict=True):
            if isinstance(layer, FollowerLayer):
                continue
            total += batch * sizes.state_bytes(self.dtype)
            if not isinstance(layer, KVLayer):
                total += batch * sizes.native_bytes(tokens, self.dtype)
        return total


def load_config(name: str) -> PreTrainedConfig:
    """The config of a Hub id, a local folder, a `config.json`, or a preset (`PRESETS`). Downloads no weights.

    Raises `ValueError` saying what to do, for names that lead nowhere and for types that transformers does not know.
    """
    if not os.path.exists(name) and name.lower() in PRESETS:
        return preset_config(name.lower())
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(f"{name}: the folder has no config.json; give the folder of a model, or the file itself")
    try:
        with _quiet():
            return AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"{name}: no config found. Give a Hub id that this machine can reach, a folder, a config.json, or one of "
            f"{', '.join(PRESETS)} ({_first(error)})"
        ) from error
    except Exception as error:  # classes of configs check values each in its own way, or divide by them
        known = f"transformers {transformers.__version__}"
        if "model type" in str(error) or "model_type" in str(error):
            raise ValueError(f"{name}: {known} does not know this model type; upgrade it ({_first(error)})") from error
        raise ValueError(f"{name}: {known} cannot read this config ({_first(error)})") from error


def _first(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= 160 else words[:157] + "..."


def measure_sizes(config: PreTrainedConfig, dtype: torch.dtype | None = None, name: str = "") -> ModelSizes:
    """Build the model on the meta device and read off what it caches.

    Args:
        config: of the model; it is not changed.
        dtype: of weights and cache; that of the config (or bfloat16) if None.
        name: what to call it.

    Raises:
        ValueError: types without a causal language model.
        NotImplementedError: encoder-decoder models, models without a key/value cache, and models whose layers hold what
            cannot be told from shapes.
    """
    config = copy.deepcopy(config)
    name = name or config.model_type
    chosen = dtype or getattr(config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    if config.is_encoder_decoder:
        raise NotImplementedError(
            f"{name}: '{config.model_type}' is an encoder-decoder model; only decoders are counted"
        )
    with _quiet():
        model = _on_meta(config, name)
        reason = own_cache_reason(model)
        if reason is not None:
            raise NotImplementedError(f"{name}: '{config.model_type}' keeps no key/value cache: {reason}")
        layers = _layers(model, name)
    if not layers:
        raise ValueError(f"{name}: the config has no layers (num_hidden_layers), so there is nothing to cache")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSizes(name, model, model.config, chosen, parameters, layers)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of others: about retries, about configs that are older than the code."""
    verbosity = transformers.logging.get_verbosity()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    transformers.logging.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        hub.setLevel(level)


def _on_meta(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """In bfloat16, for which every kernel has a meta form. Quantized checkpoints are built as if they were not."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    last: Exception | None = None
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        wanted = auto._model_mapping.get(type(config), None)
        classes = wanted if isinstance(wanted, (list, tuple)) else [wanted]
        for cls in filter(None, classes):
            own = getattr(cls, "config_class", None)
            # Some mappings name the composite config where the class takes that of its decoder.
            parts = [config] if own is None or isinstance(config, own) else []
            parts += [part for part in vars(config).values() if own is not None and isinstance(part, own)]
            try:
                with torch.device("meta"):
                    return cls._from_config((parts or [config])[0], dtype=torch.bfloat16).eval()
            except Exception as error:  # whatever a modelling file raises for a config that does not fit it
                last = error
    if last is None:
        raise ValueError(
            f"{name}: '{config.model_type}' has no causal language model in transformers {transformers.__version__}, "
            "so it generates no text"
        )
    raise ValueError(f"{name}: the config does not build a model ({type(last).__name__}: {_first(last)})") from last


def _layers(model: Any, name: str) -> list[LayerSizes]:
    cache = DynamicCache(config=model.config)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.zeros(getattr(model, "num_codebooks", 1), _TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            model(ids, use_cache=True, **{argument: cache})
    except Exception as error:  # operations that need numbers: routers in loops, checks of the mask
        return _from_config(model.config, name, error)
    own = sorted({type(layer).__name__ for layer in cache.layers if type(layer).__module__ != DynamicLayer.__module__})
    if own:
        raise NotImplementedError(
            f"{name}: '{model.config.model_type}' has cache layers of its own ({', '.join(own)}), which hold more than "
            "rows; measure `cache.nbytes` of a loaded model"
        )
    return [_read(layer) for layer in cache.layers]


def _window(layer: Any) -> int | None:
    window = getattr(layer, "sliding_window", None)
    return window if isinstance(window, int) else None


def _read(layer: Any) -> LayerSizes:
    """The sizes of a layer that has seen `_TOKENS` tokens of one sequence."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    shape = None
    if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == 4:
        shape = (keys.shape[1], keys.shape[3], values.shape[3])
    indexer = getattr(layer, "indexer_keys", None)
    more = indexer.numel() // indexer.shape[1] if isinstance(indexer, torch.Tensor) else 0
    states = [
        tensor
        for table in ("conv_states", "recurrent_states")
        for tensor in getattr(layer, table, {}).values()
        if isinstance(tensor, torch.Tensor)
    ]
    narrow = sum(tensor.numel() for tensor in states if tensor.dtype == torch.bfloat16)
    wide = sum(tensor.numel() for tensor in states if tensor.dtype != torch.bfloat16)
    return LayerSizes(type(layer).__name__, shape, _window(layer), more, narrow, wide)


def _from_config(config: PreTrainedConfig, name: str, error: Exception) -> list[LayerSizes]:
    """The sizes of plain attention layers by the names in the config, where the model does not run on shapes."""
    layers = DynamicCache(config=config).layers
    by_layer = _by_layer(config.get_text_config(decoder=True), len(layers))
    plain = all(type(layer) is DynamicLayer or type(layer) is DynamicSlidingWindowLayer for layer in layers)
    try:
        if plain:
            return [
                LayerSizes(type(layer).__name__, _row_shape(by_layer[index]), _window(layer), 0, 0, 0)
                for index, layer in enumerate(layers)
            ]
    except (AttributeError, TypeError, IndexError):
        pass  # sizes in places of their own
    raise NotImplementedError(
        f"{name}: what layers of kind {', '.join(sorted({type(layer).__name__ for layer in layers}))} hold cannot be "
        f"told from the config, because the model does not run on shapes alone ({_first(error)}). Measure "
        "`cache.nbytes` of a loaded model"
    ) from error
