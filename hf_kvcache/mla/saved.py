"""Converted models as checkpoints: `save_pretrained` and the auto classes, once hf_kvcache is imported.

The config of a converted model is the host's own with more entries: `host_model_type`, and `mla`, the sizes of each
converted layer. Its model type is this package's, so transformers without it says that it does not know the model,
instead of loading something else.
"""

from __future__ import annotations

import math
from functools import cache as memoized
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .host import attention_modules
from .module import LayerDims, attention_class
from .pre_rope import FORM as PRE_ROPE
from .pre_rope import install_pre_rope

MODEL_TYPE = "hf_kvcache_mla"
_LARGEST = 1 << 20
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
_FLAGS = ("q_norm", "k_norm", "q_bias", "kv_bias", "o_bias")
_EXTRAS = ("sliding_window", "softcap")


class MLAConfig(PreTrainedConfig):
    """Stands for the configs of all converted models: `AutoConfig` gives the host's own, extended."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if cls is not MLAConfig:
            return super().from_dict(config_dict, **kwargs)
        host = config_dict.get("host_model_type")
        if not isinstance(host, str) or host not in CONFIG_MAPPING or host == MODEL_TYPE:
            raise ValueError(
                f"this checkpoint was converted from a {host!r} model, which this transformers does not know"
            )
        return config_class(CONFIG_MAPPING[host]).from_dict(config_dict, **kwargs)


@memoized
def config_class(host: Any) -> type[PreTrainedConfig]:
    """The host's config class under this package's model type, registered with the auto classes."""
    made = type(f"MLA{host.__name__}", (host,), {"model_type": MODEL_TYPE, "__module__": __name__})
    for auto in (AutoModel, AutoModelForCausalLM):
        model = auto._model_mapping.get(host, None)
        if isinstance(model, type):
            auto.register(made, model_class(model, made), exist_ok=True)
    return made


@memoized
def model_class(host: Any, config: Any) -> type[PreTrainedModel]:
    """The host's model class, which puts converted attention in place as soon as it is built."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        host.__init__(self, config, *args, **kwargs)
        install(self, config)

    entries = {"__init__": __init__, "config_class": config, "__module__": __name__}
    return type(f"MLA{host.__name__}", (host,), entries)


def adopt(model: PreTrainedModel, layers: list[dict[str, Any]]) -> None:
    """Make a model whose modules are converted one of the classes above."""
    config: Any = model.config
    host: Any = type(config)
    kind: Any = type(model)
    config.host_model_type = host.model_type
    config.mla = layers
    if not any(layer.get("form") == PRE_ROPE for layer in layers):
        # What tells caches and kernels of a latent; the largest, where layers differ.
        config.kv_lora_rank = max(layer["kv_lora_rank"] for layer in layers)
        config.qk_rope_head_dim = max(layer["qk_rope_head_dim"] for layer in layers)
    made: Any = config_class(host)
    config.__class__ = made
    model.__class__ = model_class(kind, made)


def install(model: PreTrainedModel, config: Any) -> None:
    """Replace the attention modules that `config.mla` names. Raises `ValueError` for entries that do not fit."""
    modules = dict(attention_modules(model))
    entries = getattr(config, "mla", None)
    if not isinstance(entries, list) or not entries:
        raise ValueError("the config of this converted model has no `mla`, the sizes of its layers")
    for entry in entries:
        if isinstance(entry, dict) and entry.get("form") == PRE_ROPE:
            if entry.get("name") not in modules:
                raise ValueError(f"the config of this converted model names {entry.get('name')!r}, which it has not")
            install_pre_rope(model, modules.pop(entry["name"]), entry)
            continue
        name, dims = _read(entry)
        old = modules.pop(name, None)
        if old is None:
            raise ValueError(f"the config of this converted model names {name!r}, which is no attention module of it")
        if dims.num_heads * dims.head_dim != old.o_proj.in_features or dims.hidden_size != old.o_proj.out_features:
            raise ValueError(f"the sizes of {name} in `mla` do not fit the model")
        kind: Any = type(old)
        new = attention_class(kind)(old.config, old.layer_idx, dims)
        if dims.q_norm:
            new.q_norm = old.q_norm
        if dims.k_norm:
            new.k_norm = old.k_norm
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)


def _read(entry: Any) -> tuple[str, LayerDims]:
    """Sizes of a layer from JSON that may come from anywhere."""
    try:
        name = entry["name"]
        sizes = {key: entry[key] for key in _SIZES}
        flags = {key: entry[key] for key in _FLAGS}
        scaling, extras = entry["scaling"], dict(entry["extras"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"an entry of `mla` in the config lacks {error}") from error
    numbers = [scaling, *extras.values()]
    good = (
        isinstance(name, str)
        and all(type(size) is int and 0 < size <= _LARGEST for size in sizes.values())
        and all(type(flag) is bool for flag in flags.values())
        and all(key in _EXTRAS for key in extras)
        and all(type(x) in (int, float) and math.isfinite(x) and x > 0 for x in numbers)
        and sizes["qk_rope_head_dim"] % 2 == 0
        and sizes["num_heads"] % sizes["num_kv_heads"] == 0
    )
    if not good:
        raise ValueError(f"an entry of `mla` in the config is not understood: {str(entry)[:200]}")
    return name, LayerDims(**sizes, **flags, scaling=scaling, extras=extras)


AutoConfig.register(MODEL_TYPE, MLAConfig, exist_ok=True)
