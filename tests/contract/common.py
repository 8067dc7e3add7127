"""What the contract matrix is made of: tiny seeded models, the caches under test, and one way to drive a model.

Weights are drawn wide (`initializer_range` 0.2, biases and attention sinks too), so that logits are far from uniform
and a wrong mask changes tokens; `test_models.py` holds that against a deliberately wrong mask.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)

from hf_kvcache import (
    BlockPool,
    CPUOffloadedCache,
    HeavyHitterCache,
    KVCache,
    QuantizedKIVICache,
    SlidingWindowCache,
    SnapKVCache,
    convert_to_mla,
    enable_absorb,
)

VOCABULARY = 96
WINDOW = 8  # the models' own sliding window

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)


def _config(name: str) -> Any:
    sizes = dict(_SIZES)
    if name == "llama":
        return LlamaConfig(**sizes)
    if name == "qwen2":
        return Qwen2Config(**sizes)
    if name == "mistral":
        return MistralConfig(sliding_window=WINDOW, **sizes)
    if name == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3TextConfig(**sizes | dict(num_hidden_layers=3, layer_types=kinds, sliding_window=WINDOW))
    if name == "gemma2":
        kinds = ["sliding_attention", "full_attention"]
        return Gemma2Config(
            **sizes,
            layer_types=kinds,
            sliding_window=WINDOW,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=None,
            query_pre_attn_scalar=8,
        )
    if name == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"]
        return GptOssConfig(
            **sizes, layer_types=kinds, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2
        )
    if name == "deepseek_v3":
        sizes.pop("head_dim")
        return DeepseekV3Config(
            **sizes | dict(num_key_value_heads=4),
            kv_lora_rank=8,
            q_lora_rank=None,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=4,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            n_shared_experts=1,
        )
    raise KeyError(name)


# Rows of the model axis. "/all" takes the windowed layers over as well; every layer of Mistral is one, so there
# `scope="full"` would leave nothing to evict from. All experts are active: a router flips on rounding errors.
# "/absorb" attends to latents as they are cached.
MODELS = ("llama", "qwen2", "mistral/all", "gemma3", "gemma3/all", "gpt_oss", "gpt_oss/all", "gemma2", "deepseek_v3")
# "converted" is a converted model, whose latents are attended to likewise.
MODELS += ("deepseek_v3/absorb", "converted", "converted/absorb")
ATTENTION = ("sdpa", "eager")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Stock SDPA of these has no attention sinks (or no soft cap), so transformers refuses it; ours computes them.
EAGER_ORACLE = ("gpt_oss", "gemma2")
# transformers 5.24 renamed the argument; the old name is tested in `test_lossless.py`.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@functools.cache
def _built(name: str, dtype: str) -> PreTrainedModel:
    if name == "converted":
        ids = torch.randint(2, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(5))
        return convert_to_mla(copy.deepcopy(_built("llama", "fp32")), kv_keep=0.75, calibration=ids)[0].to(
            DTYPES[dtype]
        )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(_config(name), attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "sinks" in key:
                parameter.normal_(0, 1)
            elif not parameter.any() or bool((parameter == 1).all()):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.startswith("gemma") and key.endswith("post_attention_layernorm.weight"):
                parameter.add_(3)  # scaled embeddings would drown attention otherwise
    model.generation_config.pad_token_id = 0
    return model.to(DTYPES[dtype])


@functools.cache
def model_of(case: str, attention: str = "sdpa", dtype: str = "fp32") -> PreTrainedModel:
    """The model under test; caches attach it. The same object for every test, weights never change."""
    name = case.partition("/")[0]
    model = copy.deepcopy(_built(name, dtype))
    model.config._attn_implementation_internal = attention
    return enable_absorb(model) if case.endswith("/absorb") else model


@functools.cache
def stock_of(case: str, attention: str = "sdpa", dtype: str = "fp32") -> PreTrainedModel:
    """A twin with the same weights that is never attached: the oracle."""
    name = case.partition("/")[0]
    model = copy.deepcopy(_built(name, dtype))
    model.config._attn_implementation_internal = "eager" if name in EAGER_ORACLE else attention
    return model


def scope_of(case: str) -> dict[str, str]:
    return {"scope": "all"} if case.endswith("/all") else {}


Make = Callable[..., KVCache]
POOL = BlockPool(3)  # all paged caches of these tests draw from it; small blocks have many ends

# label -> (cache with room for every token of these tests, cache that has to drop)
_CACHES: dict[str, tuple[type[KVCache], dict[str, Any], dict[str, Any] | None]] = {
    "kv": (KVCache, {}, None),
    # Pages leave after a few tokens in both.
    "offload_fetch": (
        CPUOffloadedCache,
        dict(resident_length=4, page=4, attend="fetch"),
        dict(resident_length=1, page=2, attend="fetch"),
    ),
    "offload_compute": (
        CPUOffloadedCache,
        dict(resident_length=4, page=4),
        dict(resident_length=1, page=2),
    ),
    "window": (
        SlidingWindowCache,
        dict(window_length=120, num_sink_tokens=2),
        dict(window_length=6, num_sink_tokens=2),
    ),
    "snapkv": (
        SnapKVCache,
        dict(max_capacity_prompt=120, window_size=4, kernel_size=3),
        dict(max_capacity_prompt=10, window_size=4, kernel_size=3),
    ),
    "snapkv_decode": (
        SnapKVCache,
        dict(max_capacity_prompt=120, window_size=4, kernel_size=3, decode_budget=8),
        dict(max_capacity_prompt=10, window_size=4, kernel_size=3, decode_budget=2),
    ),
    "snapkv_pyramid": (
        SnapKVCache,
        dict(max_capacity_prompt=240, window_size=4, kernel_size=3, pyramid_beta=2),
        dict(max_capacity_prompt=10, window_size=4, kernel_size=3, pyramid_beta=3),
    ),
    "snapkv_maxpool": (
        SnapKVCache,
        dict(max_capacity_prompt=120, window_size=4, kernel_size=3, pooling="maxpool"),
        dict(max_capacity_prompt=10, window_size=4, kernel_size=3, pooling="maxpool", num_sink_tokens=1),
    ),
    "snapkv_adaptive": (
        SnapKVCache,
        dict(max_capacity_prompt=120, window_size=4, kernel_size=3, adaptive_heads=True),
        dict(max_capacity_prompt=10, window_size=4, kernel_size=3, adaptive_heads=True),
    ),
    "h2o": (HeavyHitterCache, dict(heavy_size=60, recent_size=60), dict(heavy_size=4, recent_size=4)),
    # Nothing is packed at these lengths; `test_codecs.py` has longer ones.
    "kivi": (QuantizedKIVICache, dict(nbits=4), dict(nbits=4, residual_length=4, num_sink_tokens=2)),
    "paged": (KVCache, dict(pool=POOL), None),
    # Ratios are of the prompt: all of it fits, the generated tokens do not.
    "h2o_ratio": (
        HeavyHitterCache,
        dict(heavy_ratio=0.5, recent_ratio=0.5),
        dict(heavy_ratio=0.25, recent_ratio=0.25),
    ),
}
CACHES = tuple(_CACHES)
KEEPING = ("kv", "kivi", "paged", "offload_fetch", "offload_compute")
EVICTING = tuple(label for label in CACHES if label not in KEEPING)
LOSSLESS = tuple(label for label in CACHES if label != "h2o_ratio")


def _parts(label: str, case: str) -> tuple[type[KVCache], dict[str, Any], dict[str, Any] | None]:
    # Without a layer of full attention there is nothing to offload: refused, as `test_offload.py` holds.
    return _CACHES["kv" if label.startswith("offload") and case == "mistral/all" else label]


def roomy(label: str, model: PreTrainedModel, case: str = "") -> KVCache:
    """A cache with budgets no smaller than anything that these tests feed."""
    kind, room, _ = _parts(label, case)
    return kind(model, **room, **scope_of(case))


def tight(label: str, model: PreTrainedModel, case: str = "", **changes: Any) -> KVCache:
    """A cache whose budgets are far below the prompt (the identity for "kv")."""
    kind, room, small = _parts(label, case)
    return kind(model, **(small if small is not None else room) | changes, **scope_of(case))


def dynamic(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


LENGTHS = (18, 12, 6)  # real tokens of the rows of a padded batch; even, because ratios round down


def batch(rows: int, more: int = 0, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and 2-D mask `[rows, lengths[0] + more]`, left-padded; the last `more` columns are for decoding."""
    generator = torch.Generator().manual_seed(11)
    width = lengths[0] + more
    # The same tokens whatever `more` and `rows` are, so that oracles can be shared.
    ids = torch.randint(2, VOCABULARY, (len(LENGTHS), 64), generator=generator)[:rows, :width].clone()
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : lengths[0] - lengths[row]] = 0
    return ids.masked_fill(mask == 0, 0), mask


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def feed(
    model: PreTrainedModel,
    cache: Any,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    blocks: list[int] | None = None,
    whole: bool = False,
    start: int = 0,
) -> torch.Tensor:
    """Teacher-force `ids` in blocks of the given sizes; logits of each block's last token (or of all, `whole`)."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = positions_of(mask)
    out = []
    for size in blocks or [ids.shape[1] - start]:
        stop = start + size
        logits = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            use_cache=True,
            **{CACHE: cache},
        ).logits.float()
        out.append(logits if whole else logits[:, -1:])
        start = stop
    return torch.cat(out, dim=1)


def generate(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any):
    """Tokens of `generate` (prompt included); greedy unless told otherwise."""
    kwargs = dict(max_new_tokens=8, do_sample=False) | kwargs
    if kwargs["do_sample"]:
        torch.manual_seed(kwargs.pop("seed", 3))
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **kwargs)


# Measured over the whole matrix: float32 differences stay below 2e-5; bf16 ones are rounding of 8 mantissa bits.
TOLERANCE = {"fp32": 2e-4, "bf16": 0.15}


def assert_close(ours: torch.Tensor, expected: torch.Tensor, dtype: str = "fp32") -> None:
    assert ours.shape == expected.shape
    assert torch.isfinite(ours).all()
    worst = float((ours - expected).abs().max())
    assert worst <= TOLERANCE[dtype], f"logits differ by {worst:.3g} (their spread is {float(expected.std()):.2g})"
