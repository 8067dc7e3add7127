"""Converted models as DeepSeek-V3 checkpoints: read by transformers alone, equal to what they were made from."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_mla_convert import CALIBRATION, HOSTS, MASK, PROMPT, build, generate, logits
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
)

from hf_kvcache import KVCache, convert_to_mla, disable_absorb, enable_absorb, export_deepseek_v3
from hf_kvcache.mla import folder as folder_module
from hf_kvcache.mla.deepseek import fold_of
from hf_kvcache.mla.folder import ShardWriter, bytes_of, check_room, new_folder

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 20,
    "factor": 4.0,
}


def llama(dtype=torch.float32, **kwargs):
    return build(LlamaForCausalLM, LlamaConfig, dtype, **{"num_key_value_heads": 2} | kwargs)


EXPORTED = {host: HOSTS[host] for host in ("llama", "mha", "mqa", "yarn", "llama_bias", "qwen2")}
EXPORTED |= {
    "eps": lambda dtype=torch.float32: llama(dtype, rms_norm_eps=1e-5),
    "tied": lambda dtype=torch.float32: llama(dtype, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama3": lambda dtype=torch.float32: llama(dtype, rope_parameters=LLAMA3),
    "linear": lambda dtype=torch.float32: llama(
        dtype, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "longrope": lambda dtype=torch.float32: llama(dtype, rope_parameters=LONGROPE),
    "wide heads": lambda dtype=torch.float32: llama(dtype, head_dim=32, hidden_act="gelu"),
}
VLLM = ("llama", "mha", "mqa", "eps", "tied")
SIZES = {
    "full": {"kv_keep": 1.0},
    "half": {"kv_keep": 0.5},
    "uniform": {"kv_keep": 0.5, "rotary": "uniform"},
    "default": {"kv_keep": 0.5, "rotary": "default"},
}


def converted(model, **sizes):
    return convert_to_mla(model, calibration=CALIBRATION, **sizes)[0]


def read_back(path, **kwargs):
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **kwargs)
    assert type(loaded) is DeepseekV3ForCausalLM
    return loaded


def assert_same(loaded, model, tolerance=2e-6):
    """Logits of padded rows, greedy tokens and beams."""
    ours, exact = (logits(m, PROMPT, MASK)[MASK.bool()] for m in (loaded, model))
    assert float((ours - exact).abs().max()) <= tolerance * float(exact.abs().max())
    assert torch.equal(generate(loaded), generate(model))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("host", EXPORTED)
def test_transformers_reads_the_same_model(host, sizes, tmp_path) -> None:
    model = converted(EXPORTED[host](), **SIZES[sizes])
    report = export_deepseek_v3(model, tmp_path / "out")
    loaded = read_back(tmp_path / "out")
    assert_same(loaded, model)
    # The norm of the latents counts in float32, whatever the model does.
    assert report.difference < 2e-6 and report.fold_error < 1e-9
    cache = DynamicCache(config=loaded.config)
    with torch.no_grad():
        loaded(input_ids=PROMPT, past_key_values=cache)
    held = sum(layer.keys.shape[-1] + layer.values.shape[-1] for layer in cache.layers)
    assert held == report.elements >= report.elements_before
    if sizes != "half":
        assert report.elements == report.elements_before


@pytest.mark.parametrize("host", ["mha", "qwen2", "longrope", "eps"])
def test_the_original_at_full_sizes_in_float64(host, tmp_path) -> None:
    original = EXPORTED[host](torch.float64)
    export_deepseek_v3(converted(copy.deepcopy(original), kv_keep=1.0), tmp_path / "out")
    loaded = read_back(tmp_path / "out")
    assert loaded.dtype == torch.float64
    exact, ours = logits(original), logits(loaded)
    assert float((ours - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


@pytest.mark.parametrize("host", VLLM)
def test_vllm(host, tmp_path) -> None:
    """What vLLM's loader takes: see `docs/mla_export.md`. transformers must read the same model."""
    original = EXPORTED[host]()
    eps = original.config.rms_norm_eps
    model = converted(original, kv_keep=0.6, rotary="default")
    report = export_deepseek_v3(model, tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["model_type"] == "deepseek_v3"
    # Its norms, that of the latents among them, take one eps from the config; transformers' has 1e-6 for the latents.
    assert config["rms_norm_eps"] == 1e-6
    assert report.stream_scale == pytest.approx((1e-6 / eps) ** 0.5)
    assert config["rope_parameters"].keys() == {"rope_type", "rope_theta"}
    assert config["rope_parameters"]["rope_type"] == "default" and config["rope_interleave"]
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 2
    assert config["num_nextn_predict_layers"] == 0 and config["q_lora_rank"] is None
    assert config["routed_scaling_factor"] == 1.0 and type(config["n_routed_experts"]) is int
    assert not config["attention_bias"] and not config["tie_word_embeddings"]
    assert config["num_key_value_heads"] == config["num_attention_heads"] and config["hidden_act"] == "silu"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    per_layer = {
        "self_attn.q_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm",
        "self_attn.kv_b_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    }
    expected = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in per_layer}
    assert names == expected | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    size = config["qk_nope_head_dim"]
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4 * (size + rope), 64)
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (rank + rope, 64)
    assert shapes["model.layers.0.self_attn.kv_b_proj.weight"] == (4 * 2 * size, rank)
    assert_same(read_back(tmp_path / "out"), model)


def test_vllm_norms_of_any_eps_agree(tmp_path) -> None:
    """vLLM gives its norm of the latents the config's eps. At 1e-6 that is what transformers does."""
    model = converted(EXPORTED["eps"](), kv_keep=0.6, rotary="default")
    export_deepseek_v3(model, tmp_path / "out", "vllm")
    loaded = read_back(tmp_path / "out")
    eps = {m.variance_epsilon for m in loaded.modules() if hasattr(m, "variance_epsilon")}
    assert eps == {1e-6}


@pytest.mark.parametrize("target", ["hf", "vllm"])
def test_bfloat16(target, tmp_path) -> None:
    """Computed from float32, rounded once: as far from the original as the working form in bfloat16."""
    model = converted(EXPORTED["eps"](), kv_keep=0.6, rotary="default")
    report = export_deepseek_v3(model, tmp_path / "out", target, dtype=torch.bfloat16)
    loaded = read_back(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and model.dtype == torch.float32
    exact = logits(model)
    off = [float((logits(m) - exact).square().mean().sqrt()) for m in (loaded, copy.deepcopy(model).bfloat16())]
    assert off[0] <= 1.5 * off[1]
    assert off[0] < 0.05 * float(exact.square().mean().sqrt())
    # The weight of the norm is rounded, and what follows makes up for it: no layer's values are all a little too large.
    for layer, mine in zip(loaded.model.layers, report.layers, strict=True):
        attention = layer.self_attn
        factor = mine["scale"] * float(attention.kv_a_layernorm.weight[0]) / 1e-6**0.5
        ours = attention.kv_b_proj.weight.detach().double() * factor
        theirs = model.model.layers[attention.layer_idx].self_attn.kv_b_proj.weight.detach().double()
        assert abs(float((ours * theirs).sum() / theirs.square().sum()) - 1) < 3e-4


def test_a_bfloat16_model(tmp_path) -> None:
    model = converted(EXPORTED["llama"](), kv_keep=0.5).bfloat16()
    export_deepseek_v3(model, tmp_path / "out")
    loaded = read_back(tmp_path / "out")
    exact = logits(model).float()
    assert float((logits(loaded).float() - exact).abs().max()) <= 0.08 * float(exact.abs().max())


def test_the_fold_holds_for_latents_that_were_never_seen(tmp_path) -> None:
    """Tokens whose latents are 30 times as large as any that was seen lose a few parts in ten million."""
    for rms in (0.1, 1.0, 50.0):
        for dtype in (torch.float32, torch.bfloat16):
            fold = fold_of(rms, dtype)
            for size in (0.01, 1.0, 30.0):
                rows = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * rms * size
                scaled = rows * fold.scale
                normed = scaled * (scaled.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * fold.weight * fold.after
                assert float((normed / rows - 1).abs().max()) < 1e-6
            assert float(torch.tensor(fold.weight).to(dtype)) == fold.weight
            assert fold.scale > 1e-20


def test_absorbed_too(tmp_path) -> None:
    """What is written is a model with latent attention like any other."""
    model = converted(EXPORTED["llama"](), kv_keep=0.5)
    export_deepseek_v3(model, tmp_path / "out")
    loaded = read_back(tmp_path / "out")
    expected = generate(model)
    enable_absorb(loaded)
    assert torch.equal(generate(loaded, KVCache(loaded)), expected)
    assert torch.equal(generate(loaded, num_beams=3), generate(model, num_beams=3))
    enable_absorb(model)
    export_deepseek_v3(model, tmp_path / "again")  # an absorbing model is exported likewise
    disable_absorb(model)
    assert torch.equal(logits(read_back(tmp_path / "again")), logits(disable_absorb(loaded)))


def test_after_a_round_trip_and_from_shards(tmp_path) -> None:
    model = converted(EXPORTED["qwen2"](), kv_keep=0.5)
    model.save_pretrained(tmp_path / "working", max_shard_size="30KB")
    assert len(list((tmp_path / "working").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "working")
    export_deepseek_v3(again, tmp_path / "out", max_shard_size="40KB")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert all((tmp_path / "out" / file).stat().st_size < 80_000 for file in files)
    assert_same(read_back(tmp_path / "out"), model)


def test_sharded_and_dispatched_models_are_converted_and_exported(tmp_path) -> None:
    """A checkpoint of several files, its layers given to devices by accelerate."""
    pytest.importorskip("accelerate")
    original = EXPORTED["llama"]()
    original.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu"}
    devices |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    dispatched = AutoModelForCausalLM.from_pretrained(tmp_path / "in", device_map=devices)
    from accelerate import dispatch_model

    dispatched = dispatch_model(dispatched, devices, force_hooks=True)
    assert hasattr(dispatched.model.layers[0].self_attn, "_hf_hook")
    plain = converted(copy.deepcopy(original), kv_keep=0.5)
    model = converted(dispatched, kv_keep=0.5)
    assert hasattr(model.model.layers[0].self_attn, "_hf_hook")
    assert torch.equal(logits(model), logits(plain))
    assert torch.equal(generate(model), generate(plain))
    export_deepseek_v3(model, tmp_path / "out")
    assert_same(read_back(tmp_path / "out"), plain)


def test_offloaded_weights_are_refused(tmp_path) -> None:
    pytest.importorskip("accelerate")
    model = converted(EXPORTED["llama"](), kv_keep=0.5)
    from accelerate import cpu_offload

    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="not in memory"):
        export_deepseek_v3(model, tmp_path / "out")


def test_without_this_package(tmp_path) -> None:
    """Another process reads it, with transformers and nothing else."""
    model = converted(EXPORTED["llama"](), kv_keep=1.0)
    export_deepseek_v3(model, tmp_path / "out")
    torch.save(PROMPT, tmp_path / "ids.pt")
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r})
with torch.no_grad():
    torch.save(model(torch.load({str(tmp_path / "ids.pt")!r})).logits, {str(tmp_path / "logits.pt")!r})
assert not any(name.startswith("hf_kvcache") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
    ours = torch.load(tmp_path / "logits.pt")
    exact = logits(EXPORTED["llama"]())
    assert float((ours - exact).abs().max()) <= 2e-6 * float(exact.abs().max())


def test_generation_config_tokenizer_and_config_come_along(tmp_path) -> None:
    model = converted(EXPORTED["llama"](), kv_keep=0.5)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "other.bin").write_text("")
    model.config._name_or_path = str(source)
    export_deepseek_v3(model, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.7
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.max_position_embeddings == 256

    class Tokenizer:
        def save_pretrained(self, folder):
            Path(folder, "tokenizer_config.json").write_text("{}")

    export_deepseek_v3(model, tmp_path / "other", tokenizer=Tokenizer())
    assert (tmp_path / "other" / "tokenizer_config.json").exists()
    assert not (tmp_path / "other" / "tokenizer.json").exists()


def test_the_report() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        report = export_deepseek_v3(
            converted(EXPORTED["eps"](), kv_keep=0.5), Path(scratch) / "out", max_shard_size=9**9
        )
        size = (Path(scratch) / "out" / "model.safetensors").stat().st_size
    assert 0 < size - report.nbytes < 5000
    assert "DeepseekV3ForCausalLM for hf" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["scale"] < 1e-6


# ---------------------------------------------------------------------- refusals


def biased(part):
    model = llama()
    linear = model.get_submodule(part)
    linear.bias = nn.Parameter(torch.ones(linear.out_features))
    return model


@pytest.mark.parametrize(
    ("make", "target", "match"),
    [
        (HOSTS["qwen3"], "hf", "normalized by head"),
        (HOSTS["gemma2"], "hf", "soft cap"),
        (HOSTS["gemma3"], "hf", "DeepSeek-V3"),
        (HOSTS["mistral"], "hf", "sliding window of 8"),
        (HOSTS["mistral"], "vllm", "sliding window of 8"),
        (HOSTS["qwen2"], "vllm", "q_proj.* has a bias"),
        (HOSTS["llama_bias"], "vllm", "has a bias"),
        (lambda: llama(mlp_bias=True), "hf", "mlp.gate_proj has a bias"),
        (lambda: llama(hidden_act="gelu"), "vllm", "'gelu'"),
        (HOSTS["yarn"], "vllm", "scaled for long contexts"),
        (EXPORTED["linear"], "vllm", "scaled for long contexts"),
        (EXPORTED["longrope"], "vllm", "two tables"),
        (
            lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "hf",
            "dynamic",
        ),
        (
            lambda: build(GraniteForCausalLM, GraniteConfig, num_key_value_heads=2, embedding_multiplier=3.0),
            "hf",
            "the embedding of this model",
        ),
        (
            lambda: build(GraniteForCausalLM, GraniteConfig, num_key_value_heads=2, residual_multiplier=0.5),
            "hf",
            "layer 0 of this model",
        ),
        (
            lambda: build(GraniteForCausalLM, GraniteConfig, num_key_value_heads=2, logits_scaling=2.0),
            "hf",
            "the head of this model",
        ),
        (lambda: build(OlmoForCausalLM, OlmoConfig, num_key_value_heads=2), "hf", "has not one RMS norm"),
    ],
)
def test_what_the_format_has_not_is_refused(make, target, match, tmp_path) -> None:
    rotary = "default" if target == "vllm" else "uniform"
    model = converted(make(), kv_keep=0.5, rotary=rotary)
    with pytest.raises(NotImplementedError, match=match):
        export_deepseek_v3(model, tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


def test_frequencies_that_vllm_has_not_are_refused(tmp_path) -> None:
    model = converted(HOSTS["mha"](), kv_keep=0.5, rotary="uniform")
    with pytest.raises(NotImplementedError, match=r"frequencies \d times.*rotary='default'"):
        export_deepseek_v3(model, tmp_path / "out", "vllm")


def test_float16_and_adapters_are_refused(tmp_path) -> None:
    model = converted(llama(), kv_keep=0.5)
    with pytest.raises(NotImplementedError, match="float16 has too small a range"):
        export_deepseek_v3(copy.deepcopy(model).half(), tmp_path / "out")
    with pytest.raises(NotImplementedError, match="float16 has too small a range"):
        export_deepseek_v3(model, tmp_path / "out", dtype=torch.float16)
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_healed"):
        export_deepseek_v3(wrapped, tmp_path / "out")
    with pytest.raises(NotImplementedError, match="merge_healed"):
        export_deepseek_v3(wrapped.base_model.model, tmp_path / "out")


def test_wrong_arguments(tmp_path) -> None:
    model = converted(llama(), kv_keep=0.5)
    with pytest.raises(ValueError, match="`target`"):
        export_deepseek_v3(model, tmp_path / "out", "onnx")
    with pytest.raises(ValueError, match="size"):
        export_deepseek_v3(model, tmp_path / "out", max_shard_size="many")
    with pytest.raises(ValueError, match="no converted attention"):
        export_deepseek_v3(llama(), tmp_path / "out")
    with pytest.raises(ValueError, match="expected a model"):
        export_deepseek_v3(nn.Linear(2, 2), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rope", [2, 6, 16])
def test_default_rotary(rope, tmp_path) -> None:
    """Evenly spaced frequencies, one component of each, the same in all layers."""
    model, report = convert_to_mla(
        HOSTS["mha"](), kv_lora_rank=64, qk_rope_head_dim=rope, rotary="default", calibration=CALIBRATION
    )
    layers = [layer.self_attn.frequencies.tolist() for layer in model.model.layers]
    steps = {b - a for a, b in zip(layers[0], layers[0][1:], strict=False)}
    assert layers[0] == layers[1] and layers[0][0] == 0 and len(layers[0]) == rope // 2 and len(steps) <= 1
    assert export_deepseek_v3(model, tmp_path / "out", "vllm").qk_rope_head_dim == rope
    assert_same(read_back(tmp_path / "out"), model)
    with pytest.raises(ValueError, match="default RoPE has each frequency once"):
        convert_to_mla(HOSTS["mha"](), qk_rope_head_dim=18, rotary="default", calibration=CALIBRATION)


# ---------------------------------------------------------------------- folders


def test_no_room(tmp_path, monkeypatch) -> None:
    model = converted(llama(), kv_keep=0.5)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(OSError, match="make room"):
        export_deepseek_v3(model, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_empty(tmp_path) -> None:
    model = converted(llama(), kv_keep=0.5)
    (tmp_path / "out").mkdir()
    export_deepseek_v3(model, tmp_path / "out")
    with pytest.raises(ValueError, match="not empty"):
        export_deepseek_v3(model, tmp_path / "out")
    (tmp_path / "out" / "old.json").write_text("")
    export_deepseek_v3(model, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "old.json").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        export_deepseek_v3(model, tmp_path / "file", overwrite=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted(error, tmp_path, monkeypatch) -> None:
    """Nothing is left, and what was there before stays."""
    model = converted(llama(), kv_keep=0.5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    add, seen = ShardWriter.add, []

    def fail(self, name, tensor):
        seen.append(name)
        if len(seen) == 15:
            raise error
        add(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "add", fail)
    with pytest.raises(error):
        export_deepseek_v3(model, tmp_path / "out", max_shard_size="10KB", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]


def test_killed(tmp_path) -> None:
    """A process that dies while it writes leaves nothing under the name that was asked for."""
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from hf_kvcache.mla.folder import new_folder
with new_folder({str(tmp_path / "out")!r}, 10) as folder:
    (folder / "config.json").write_text("{{}}")
    os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 9
    assert not (tmp_path / "out").exists()
    assert [file.name.endswith(".partial") for file in tmp_path.iterdir()] == [True]


def test_modes_of_files_are_usual_ones(tmp_path) -> None:
    with new_folder(tmp_path / "out", 0) as scratch:
        (scratch / "a").write_text("")
        (scratch / "a").chmod(0o600)
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "out" / "a").stat().st_mode & 0o777 == 0o666 & ~umask


def test_sizes() -> None:
    assert [bytes_of(x) for x in (7, "7", "5GB", "1.5 kb", "3B")] == [7, 7, 5 * 10**9, 1500, 3]
    for bad in ("", "GB", "-1", 0, "5 apples"):
        with pytest.raises(ValueError, match="size"):
            bytes_of(bad)
    assert check_room("somewhere/else", 0).is_absolute()


# ---------------------------------------------------------------------- the real model


def test_smollm2_exported_at_full_sizes(smollm2, tmp_path) -> None:
    """Rotary key = KV heads x head size, each frequency three times: the original's logits and tokens."""
    model, tokenizer = smollm2
    text = "A converted model caches one latent for each token. At full sizes nothing is lost: the capital of France is"
    ids = tokenizer(text, return_tensors="pt").input_ids
    arguments = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    exact, tokens = logits(model, ids), model.generate(ids, **arguments)
    generator = torch.Generator().manual_seed(0)
    calibration = [torch.randint(0, 49152, (1, 64), generator=generator) for _ in range(2)]
    made, _ = convert_to_mla(copy.deepcopy(model), kv_keep=1.0, calibration=calibration)
    report = export_deepseek_v3(made, tmp_path / "out", tokenizer=tokenizer)
    del made
    assert report.elements == 384 * 30 and report.rope == "longrope"
    loaded = read_back(tmp_path / "out")
    assert float((logits(loaded, ids) - exact).abs().max()) <= 1e-3
    assert torch.equal(loaded.generate(ids, **arguments), tokens)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text).input_ids == ids[0].tolist()
