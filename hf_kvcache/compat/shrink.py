"""Tiny random-weight instances of every causal-LM model type that the installed transformers maps.

Nothing is downloaded: each model is built from the default config of its own config class, shrunk by field name.
The rules below cover what most families share; `overrides.py` holds what is peculiar to single types.
"""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nVisionConfig

from .overrides import OVERRIDES

VOCAB = 256
HIDDEN = 64
MAX_POSITIONS = 512
MAX_LAYERS = 6
WEIGHT_STD = 0.3
# Small, because many families scale the embedding up or tie it to the head: a large one would let each token
# predict itself whatever the attention does.
EMBEDDING_STD = 0.06

# (pattern of the whole field name, new value); the first match wins, and a value never grows.
_SIZES: list[tuple[str, int]] = [
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"(\w+_)?(head_dim|head_size|headdim)|d_head|d_kv|qk_nope_head_dim|kv_channels|mamba_d_head", 16),
    (r"query_pre_attn_scalar", 16),
    (r"lru_width|attention_hidden_size", HIDDEN),
    (r"(\w+_)?intermediate_size(_mlp)?|(\w+_)?ffn_(hidden_size|dim)|d_ff|d_inner|n_inner|mlp_dim", 96),
    (r"feed_forward_size|dense_intermediate_size|prompt_mid_dim|(\w+_)?router_hidden_size", 32),
    (r"(\w+_)?(hidden|embedding)_size(_global)?|n_embd|d_model|emb_dim|embedding_dim|word_embed_proj_dim", HIDDEN),
    (r"vision_output_dim|projector_(in|out)put_dim|adapter_(in|out)_dim|output_channels|adapter_input_size", 64),
    (r"base_channels|num_filters|codebook_dim|vector_quantization_hidden_dimension|upsample_groups", 32),
    (r"index_n_heads", 8),  # enough for its rectified scores not to be all zero, a tie that padding would resolve
    (r"(pronunciation|shape)_embed_dim", 16),
    (r"(\w+_)?(num_attention_heads|attention_heads|num_heads|n_heads?|mamba_heads)|num_query_groups", 4),
    (r"(\w+_)?(num_key_value_heads|num_kv_heads|num_key_heads)", 2),
    (r"linear_num_value_heads", 4),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"n_groups?|num_expert_group|mamba_n_?groups", 2),
    (r"topk_group", 1),
    (r"zero_expert_num|(\w+_)?(n|num)_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"q_lora_rank", 24),
    (r"(\w+_)?(lora_rank|lowrank|rank)|d_rel", 16),
    (r"(\w+_)?(state_size|d_state)|time_step_rank|mamba_dt_rank", 8),
    (r"(\w+_)?chunk_size|block_size|chunk_length", 16),
    (r"(\w+_)?(sliding_window|window_size|sliding_window_size)|local_attention|index_topk", 8),
    (r"(\w+_)?layers|n_layer|depth|num_blocks|(\w+_)?num_hidden_layers", 2),
    (r"(\w+_)?vocab_size(\w+)?|codebook_size|num_position_embeddings", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length", MAX_POSITIONS),
    (r"max_(source|target)_positions", MAX_POSITIONS),
    (r"original_max_position_embeddings|(\w+_)?max_length", MAX_POSITIONS // 2),
]
_SIZE_RULES = [(re.compile(pattern), value) for pattern, value in _SIZES]
_LAYER_COUNT = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")
_INDEX_LISTS = re.compile(r"\w*(_idxs|layer_ids|_indices|_indexes)|moe_layers|mlp_only_layers|cross_attention_layers")
_TOKEN_FIELD = re.compile(r"\w+_(token_id|token_index)|(bos|eos|pad)_index|(unk|mask)_index")
# Fields that some classes leave unset although their models need a value.
_UNSET = {"head_dim": 16, "num_key_value_heads": 2}
_FIXED_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class ShrinkError(RuntimeError):
    """A model type could not be shrunk or built; a bug of this module, never of the caller."""


def causal_lm_types() -> list[str]:
    """The model types of the causal-LM mapping of the installed transformers, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _pick_layers(fields: dict[str, Any], total: int) -> list[int]:
    """Indices of the few layers which together show every combination of kinds that the per-layer lists declare."""
    columns: list[list[Any]] = []
    for name, value in fields.items():
        if not isinstance(value, (list, tuple)):
            continue
        if _INDEX_LISTS.fullmatch(name):
            columns.append([index in value for index in range(total)])
        elif len(value) == total and all(isinstance(item, (str, bool, int)) for item in value):
            columns.append(list(value))
    picked: list[int] = []
    seen: set[tuple[Any, ...]] = set()
    for index in range(total):
        kinds = tuple(column[index] for column in columns)
        if kinds not in seen and len(picked) < MAX_LAYERS:
            seen.add(kinds)
            picked.append(index)
    spare = (index for index in range(total) if index not in picked)
    while len(picked) < min(2, total):
        picked.append(next(spare))
    return sorted(picked)


def _shrink_rope(rope: dict[str, Any], rotary: int) -> dict[str, Any]:
    """RoPE parameters (flat, or one dict per layer type) for a head whose rotary part has `rotary` dimensions."""
    small: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            small[key] = _shrink_rope(value, rotary)
        elif key == "original_max_position_embeddings":
            small[key] = min(value, MAX_POSITIONS // 2)
        elif key in ("long_factor", "short_factor"):
            small[key] = list(value[: rotary // 2])
        elif key == "mrope_section":
            part = int(rotary * rope.get("partial_rotary_factor", 1.0)) // 2
            small[key] = [part - 2 * (part // 3), part // 3, part // 3]
        else:
            small[key] = value
    return small


def _shrunken_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Keyword arguments which rebuild `config`'s class small, by the generic rules alone."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    total = next((fields[name] for name in _LAYER_COUNT if isinstance(fields.get(name), int)), 0)
    picked = _pick_layers(fields, total)
    small: dict[str, Any] = {}
    next_token = VOCAB
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = _shrink(value)
        elif name in _LAYER_COUNT and total and value == total:
            small[name] = len(picked)
        elif _INDEX_LISTS.fullmatch(name) and isinstance(value, (list, tuple)):
            small[name] = [new for new, old in enumerate(picked) if old in value]
        elif name == "num_kv_shared_layers" and value:
            small[name] = len(picked) if value == total else min(value, len(picked) // 2)
        elif isinstance(value, (list, tuple)) and total > 1 and len(value) == total:
            small[name] = [value[index] for index in picked]
        elif name == "rope_parameters" and isinstance(value, dict):
            small[name] = value
        elif name == "use_cache":
            small[name] = True
        elif name.startswith("forced_"):
            small[name] = None
        elif _TOKEN_FIELD.fullmatch(name) and value is not None:
            ids = value if isinstance(value, (list, tuple)) else [value]
            if any(not isinstance(item, int) or item >= VOCAB for item in ids):
                next_token -= 1
                small[name] = _FIXED_TOKENS.get(name, next_token)
        elif value is None and name in _UNSET:
            small[name] = _UNSET[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            rule = next((new for pattern, new in _SIZE_RULES if pattern.fullmatch(name)), None)
            if rule is not None and rule < value:
                small[name] = rule
            elif isinstance(default := getattr(type(config), name, None), int) and value != default:
                # The parent of this sub-config sets it.
                small[name] = value
    heads = small.get("num_attention_heads")
    if "kv_lora_rank" in small and heads is not None:
        # Multi-head latent attention has no grouped heads; its `head_dim` is the rotary one.
        small["num_key_value_heads"] = heads
        if fields.get("head_dim") == fields.get("qk_rope_head_dim") and "head_dim" in small:
            small["head_dim"] = small["qk_rope_head_dim"]
    if "rope_parameters" in small:
        small["rope_parameters"] = _shrink_rope(small["rope_parameters"], small.get("head_dim", HIDDEN // 4))
    return small


class _StubTowerConfig(Gemma3nVisionConfig):  # type: ignore[misc]
    """Vision config of Gemma 3n whose tower needs no `timm`."""

    model_type = "shrunken_vision_tower"


class _StubTower(PreTrainedModel):
    """Stands where a vision tower from `timm` would; text-only inputs never reach it."""

    config_class = _StubTowerConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()


AutoModel.register(_StubTowerConfig, _StubTower, exist_ok=True)


def _shrink(config: PreTrainedConfig, extra: dict[str, Any] | None = None) -> PreTrainedConfig:
    cls = _StubTowerConfig if isinstance(config, Gemma3nVisionConfig) else type(config)
    fields = _shrunken_fields(config)
    for name, value in copy.deepcopy({**OVERRIDES.get(cls.model_type, {}), **(extra or {})}).items():
        current = getattr(config, name, None)
        fields[name] = _shrink(current, value) if isinstance(current, PreTrainedConfig) else value
    return cls(**fields)


def shrunken_config(model_type: str) -> PreTrainedConfig:
    """A tiny config of `model_type`, with a layer of each kind that the family's default config declares."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ShrinkError(f"{model_type!r} is not in the causal-LM mapping of the installed transformers")
    try:
        cls = CONFIG_MAPPING[model_type]
        config = _shrink(cls(**copy.deepcopy(OVERRIDES.get(f"{model_type}:default", {}))))
    except Exception as error:
        raise ShrinkError(f"{model_type}: cannot shrink its config: {type(error).__name__}: {error}") from error
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def _spread_weights(model: PreTrainedModel, seed: int) -> None:
    """Give weight matrices a wide spread, so that the logits of random models differ from token to token.

    Vectors (norms, biases, decay rates) and matrices which a model fills with a pattern of its own stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        if parameter.dim() < 2 or not parameter.is_floating_point():
            continue
        std, mean = torch.std_mean(parameter.detach().float())
        if not (mean.abs() <= 0.2 * std or std == 0 and mean == 0 or std.isnan()):
            continue
        with torch.no_grad():
            parameter.normal_(0.0, EMBEDDING_STD if parameter in embeddings else WEIGHT_STD, generator=generator)


def build(
    model_type: str,
    *,
    attn_implementation: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A tiny model of `model_type` in eval mode; the same seed gives the same weights."""
    config = shrunken_config(model_type)
    kwargs: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    state = torch.get_rng_state()
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
        wanted = getattr(model_class, "config_class", None)
        if wanted is not None and not isinstance(config, wanted):
            # The mapping names the composite config, the class takes the config of its decoder.
            parts = [part for part in vars(config).values() if isinstance(part, wanted)]
            config = parts[0] if parts else config
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=dtype, **kwargs)
        _spread_weights(model, seed)
    except Exception as error:
        raise ShrinkError(f"{model_type}: cannot build: {type(error).__name__}: {error}") from error
    finally:
        torch.set_rng_state(state)
    if model.generation_config is not None and model.generation_config.num_return_sequences is None:
        # Classes with a `generate` of their own read it without a default.
        model.generation_config.num_return_sequences = 1
    return model.eval()


def sample_inputs(model: PreTrainedModel, batch: int = 1, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Text inputs of `batch` rows, left-padded: row i has i * length / 3 padding tokens, at most half."""
    text = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(seed)
    # The low and the top ids are special tokens (padding, image and audio placeholders).
    input_ids = torch.randint(10, text.vocab_size - 40, (batch, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    codebooks = getattr(model, "num_codebooks", 1)
    # Models of audio codes strip their padding id from what they generate, so padding has to be another id there.
    pad = (getattr(text, "pad_token_id", None) or 0) if codebooks == 1 else 0
    for row in range(batch):
        padding = min(row * length // 3, length // 2)
        attention_mask[row, :padding] = 0
        input_ids[row, :padding] = pad
    # They also take one row of ids for each codebook of each sequence.
    input_ids = input_ids.repeat_interleave(codebooks, dim=0)
    return {"input_ids": input_ids.to(model.device), "attention_mask": attention_mask.to(model.device)}


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which `model.generate` takes a cache: `cache`, or `past_key_values` in older releases."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
