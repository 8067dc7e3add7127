"""Field values of single model types for `shrink.py`, where its generic rules do not fit.

Keys are `model_type`s; a key with `:default` holds the arguments with which the unshrunken config is made, for
classes whose plain defaults are invalid. A nested dict applies to the sub-config of that name.
"""

from __future__ import annotations

from typing import Any

_ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32}
_HYBRID = ["linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "full_attention"]
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_GEMMA3N = {
    # The last two layers reuse the keys and values of the last earlier layer of their own kind.
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": _SLIDING * 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    "intermediate_size": 96,
}
_AUDIO_PARTS = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
_AUDIO_START = {"pad_token_id": 256, "bos_token_id": 256, "decoder_start_token_id": 256}
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_NOTE = {
    # Sliding layers of this family have attention dimensions of their own.
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    # Its caches are sized by a field that only the sub-configs declare.
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": _SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]} for kind in _SLIDING
        },
    },
    "cpmant": {"dim_ff": 96},
    "ctrl": {"dff": 96},
    # The attention reads `rope_theta` from this sub-config, which declares no such field.
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 4,
        "ngpt_alpha_init": 0.5,  # the default barely moves the hidden state away from the embedding
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": _SLIDING * 2,
    },
    # With a smaller window than the text, its dynamic mask differs between one forward and step-by-step decoding.
    "doge": {"keep_window_size": 512},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": _NOTE,
    "gemma3n_text": _GEMMA3N,
    "gemma4_assistant:default": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}},
    "gemma4_unified_assistant:default": {"text_config": {"model_type": "gemma4_unified_text"}},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": _HYBRID},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    # Its cache drops what leaves the window, its uncached forward does not.
    "moshi": {"sliding_window": 512},
    # Generation fills the delay pattern of the codebooks with an id just past the vocabulary.
    "musicgen:default": _AUDIO_PARTS,
    "musicgen_melody:default": _AUDIO_PARTS,
    "musicgen_decoder": _AUDIO_START,
    "musicgen_melody_decoder": _AUDIO_START,
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 64,
            "nemo_conv_channels": 64,
            "depthwise_separable_out_channel": 64,
        }
    },
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": (16, 32), "axial_pos_embds_dim": (32, 32)},
    # The model and its cache round the query width differently unless it is a multiple of 64.
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    # The shared attention block works on the hidden states joined with the embeddings.
    "zamba": {**_ZAMBA, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {**_ZAMBA, "mamba_headdim": 32},
}
