"""Configs that come with the package, for models whose files are gated: sizes only, no weights."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

_LLAMA2: dict[str, Any] = dict(vocab_size=32000, max_position_embeddings=4096, rms_norm_eps=1e-5)
_SIZES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _LLAMA2
    | dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
    "llama-2-70b": _LLAMA2
    | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    | dict(num_key_value_heads=8),
    "llama-3-8b": dict(vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0)
    | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    | dict(num_key_value_heads=8),
}
PRESETS = tuple(_SIZES)


def preset_config(name: str) -> PreTrainedConfig:
    """The config of that name, in bfloat16."""
    return LlamaConfig(**_SIZES[name], tie_word_embeddings=False, dtype="bfloat16")
