"""Conversion to latent attention: lossless at full sizes, hosts, caches, checkpoints, refusals."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_kvcache
from hf_kvcache import HeavyHitterCache, KVCache, convert_to_mla, disable_absorb, enable_absorb, plan_mla
from hf_kvcache.mla import MLAAttention
from hf_kvcache.mla import convert as convert_module
from hf_kvcache.mla.factor import Components
from hf_kvcache.mla.host import inspect_hosts
from hf_kvcache.mla.moments import collect

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def ids_of(seed, batch=2, length=64):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


CALIBRATION = [ids_of(seed) for seed in range(6)]
PROMPT = ids_of(40, 2, 24)
MASK = torch.ones_like(PROMPT)
MASK[1, :7] = 0


def build(model, config, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    made = model(config(**SMALL | kwargs)).to(dtype).eval()
    for name, parameter in made.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.5)
        elif "q_proj" in name or "k_proj" in name:
            parameter.data *= 6  # heads that attend to something
        elif "q_norm" in name or "k_norm" in name:
            parameter.data += torch.rand_like(parameter)
    return made


HOSTS = {
    "llama": lambda dtype=torch.float32: build(LlamaForCausalLM, LlamaConfig, dtype, num_key_value_heads=2),
    "mha": lambda dtype=torch.float32: build(LlamaForCausalLM, LlamaConfig, dtype, num_key_value_heads=4),
    "mqa": lambda dtype=torch.float32: build(LlamaForCausalLM, LlamaConfig, dtype, num_key_value_heads=1),
    "yarn": lambda dtype=torch.float32: build(
        LlamaForCausalLM, LlamaConfig, dtype, num_key_value_heads=2, rope_parameters=YARN
    ),
    "llama_bias": lambda dtype=torch.float32: build(
        LlamaForCausalLM, LlamaConfig, dtype, num_key_value_heads=2, attention_bias=True
    ),
    "qwen2": lambda dtype=torch.float32: build(Qwen2ForCausalLM, Qwen2Config, dtype, num_key_value_heads=2),
    "qwen3": lambda dtype=torch.float32: build(
        Qwen3ForCausalLM, Qwen3Config, dtype, num_key_value_heads=2, head_dim=16
    ),
    "gemma2": lambda dtype=torch.float32: build(
        Gemma2ForCausalLM, Gemma2Config, dtype, num_key_value_heads=2, head_dim=16, sliding_window=8
    ),
    "gemma3": lambda dtype=torch.float32: build(
        Gemma3ForCausalLM, Gemma3TextConfig, dtype, num_key_value_heads=2, head_dim=16, sliding_window=8
    ),
    "mistral": lambda dtype=torch.float32: build(
        MistralForCausalLM, MistralConfig, dtype, num_key_value_heads=2, head_dim=16, sliding_window=8
    ),
}
hosts = pytest.mark.parametrize("host", list(HOSTS))


def attention_outputs(model, ids):
    """What every attention module gives for what comes into it in the unconverted model, by layer."""
    found = []
    handles = [
        module.register_forward_hook(lambda m, a, k, out: found.append((a, k, out[0])), with_kwargs=True)
        for _, module in convert_module_modules(model)
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def convert_module_modules(model):
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "o_proj")]


def logits(model, ids=PROMPT, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def generate(model, cache=None, mask=MASK, **kwargs):
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None} | kwargs
    return model.generate(PROMPT, attention_mask=mask, past_key_values=cache, **arguments)


@hosts
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_full_sizes_lose_nothing(host, attention) -> None:
    if host == "gemma2" and attention == "sdpa":
        pytest.skip("transformers has no soft caps in SDPA")
    model = HOSTS[host](torch.float64)
    model.set_attn_implementation(attention)
    before = attention_outputs(model, PROMPT)
    model, report = convert_to_mla(model, kv_keep=1.0, calibration=CALIBRATION)
    assert all(isinstance(m, MLAAttention) for _, m in convert_module_modules(model))
    for (args, kwargs, expected), (_, module) in zip(before, convert_module_modules(model), strict=True):
        with torch.no_grad():
            output = module(*args, **kwargs)[0]
        assert float((output - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    assert report.kept == 1.0


@pytest.mark.parametrize("host", ["mha", "qwen2", "qwen3"])
def test_directions_that_calibration_never_saw_are_not_lost(host) -> None:
    model = HOSTS[host](torch.float64)
    before = attention_outputs(model, PROMPT)
    model, _ = convert_to_mla(model, kv_keep=1.0, calibration=[ids_of(3, 1, 16)])
    for (args, kwargs, expected), (_, module) in zip(before, convert_module_modules(model), strict=True):
        with torch.no_grad():
            output = module(*args, **kwargs)[0]
        assert float((output - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@hosts
def test_generation_is_the_same_at_full_sizes(host) -> None:
    """Left-padded rows, both attention implementations, with and without absorption, two kinds of cache."""
    model = HOSTS[host]()
    expected = generate(model, DynamicCache(config=model.config))
    beams = generate(model, num_beams=3)
    model, _ = convert_to_mla(model, kv_keep=1.0, calibration=CALIBRATION)
    for implementation in ("eager",) if host == "gemma2" else ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert torch.equal(generate(model, DynamicCache(config=model.config)), expected)
        assert torch.equal(generate(model, KVCache(model)), expected)
        enable_absorb(model)
        assert torch.equal(generate(model, KVCache(model)), expected)
        assert torch.equal(generate(model, DynamicCache(config=model.config)), expected)
        assert torch.equal(generate(model, num_beams=3), beams)
        disable_absorb(model)


@hosts
def test_absorbed_equals_expanded_at_half_the_bytes(host) -> None:
    model, report = convert_to_mla(HOSTS[host](), kv_keep=0.5, calibration=CALIBRATION)
    assert report.kept <= 0.5
    solo = generate(model, mask=torch.ones_like(MASK))
    expected = generate(model, DynamicCache(config=model.config))
    assert torch.equal(expected[0], solo[0])
    beams = generate(model, num_beams=3)
    enable_absorb(model)
    assert torch.equal(generate(model, KVCache(model)), expected)
    assert torch.equal(generate(model, num_beams=3), beams)


@hosts
def test_two_turns(host) -> None:
    model, _ = convert_to_mla(HOSTS[host](), kv_keep=0.6, calibration=CALIBRATION)
    enable_absorb(model)
    results = []
    for cache in (DynamicCache(config=model.config), KVCache(model)):
        first = generate(model, cache)
        more = torch.cat([first, ids_of(77, 2, 5)], dim=1)
        mask = torch.cat([MASK, torch.ones(2, more.shape[1] - MASK.shape[1], dtype=torch.long)], dim=1)
        arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        results.append(model.generate(more, attention_mask=mask, past_key_values=cache, **arguments))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        fresh = model(input_ids=more, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
    assert torch.equal(results[0], results[1])
    assert torch.equal(fresh.argmax(-1), results[1][:, more.shape[1]])


def test_the_cache_holds_latents_of_each_layer_and_nothing_else() -> None:
    model, report = convert_to_mla(HOSTS["mha"](), kv_keep=0.5, calibration=CALIBRATION)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=PROMPT, past_key_values=cache)
    for layer, entry in zip(cache.layers, report.layers, strict=True):
        assert layer.keys.shape == (2, 1, 24, entry.kv_lora_rank)
        assert layer.values.shape == (2, 1, 24, entry.qk_rope_head_dim)
        assert layer.keys.nbytes + layer.values.nbytes == 2 * 24 * entry.bytes_after
    assert report.kept <= 0.5
    mine = KVCache(model)
    with torch.no_grad():
        model(input_ids=PROMPT, past_key_values=mine)
    assert mine.nbytes == mine.expected_bytes(model.config, 2, 24)


def test_a_policy_that_drops_works_over_latents() -> None:
    model, _ = convert_to_mla(HOSTS["llama"](), kv_keep=0.5, calibration=CALIBRATION)
    enable_absorb(model)
    whole = generate(model, HeavyHitterCache(model, heavy_size=30, recent_size=30))
    assert torch.equal(whole, generate(model))
    cache = HeavyHitterCache(model, heavy_size=6, recent_size=6)
    generate(model, cache)
    assert cache.kept_length(0) == 12


@hosts
def test_more_is_better(host) -> None:
    """Errors of each layer fall as bytes grow, and are those of the module, as far as they were measured."""
    model = HOSTS[host]()
    last = float("inf")
    for keep in (0.3, 0.6, 0.9):
        _, report = convert_to_mla(copy.deepcopy(model), kv_keep=keep, calibration=CALIBRATION)
        error = sum(layer.error for layer in report.layers)
        assert error < last
        last = error
    assert last < 0.1


@pytest.mark.parametrize("host", ["llama", "yarn", "qwen2", "qwen3", "gemma2"])
def test_the_reported_error_is_the_modules_own(host) -> None:
    model = HOSTS[host](torch.float64)
    model.set_attn_implementation("eager")
    before = attention_outputs(model, CALIBRATION[-1][:1])
    bias = [getattr(m.o_proj, "bias", None) for _, m in convert_module_modules(model)]
    model, report = convert_to_mla(model, kv_keep=0.5, calibration=CALIBRATION)
    modules = convert_module_modules(model)
    for (args, kwargs, exact), (_, module), entry, shift in zip(before, modules, report.layers, bias, strict=True):
        with torch.no_grad():
            off = module(*args, **kwargs)[0] - exact
        plain = exact if shift is None else exact - shift
        assert float(off.square().sum() / plain.square().sum()) == pytest.approx(entry.error, rel=1e-6)


@hosts
def test_saved_and_loaded(host, tmp_path) -> None:
    model, _ = convert_to_mla(HOSTS[host](), kv_keep=0.5, calibration=CALIBRATION)
    expected = logits(model)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "hf_kvcache_mla"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert type(loaded) is type(model) and isinstance(loaded, type(HOSTS[host]()))
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(generate(loaded), generate(model))
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(again)), logits(loaded))
    assert AutoConfig.from_pretrained(tmp_path).host_model_type == type(HOSTS[host]()).config_class.model_type


def test_the_original_class_still_loads_the_original(tmp_path) -> None:
    model = HOSTS["llama"]()
    model.save_pretrained(tmp_path)
    convert_to_mla(model, kv_keep=0.5, calibration=CALIBRATION)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert LlamaConfig.model_type == "llama"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c["mla"][0].update(kv_lora_rank=-3), "not understood"),
        (lambda c: c["mla"][0].update(kv_lora_rank=1 << 40), "not understood"),
        (lambda c: c["mla"][0].update(extras={"eval": 1}), "not understood"),
        (lambda c: c["mla"][0].update(num_heads=3, num_kv_heads=1), "do not fit"),
        (lambda c: c["mla"][0].update(name="model.layers.0.mlp"), "no attention module"),
        (lambda c: c["mla"][0].pop("scaling"), "lacks"),
        (lambda c: c.pop("mla"), "has no `mla`"),
        (lambda c: c.update(host_model_type="../evil"), "does not know"),
    ],
)
def test_a_broken_config_is_refused(change, match, tmp_path) -> None:
    model, _ = convert_to_mla(HOSTS["llama"](), kv_keep=0.5, calibration=CALIBRATION)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=match):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@hosts
def test_training_reaches_every_part(host) -> None:
    model, _ = convert_to_mla(HOSTS[host](), kv_keep=0.5, calibration=CALIBRATION)
    enable_absorb(model)
    model.train()
    model.gradient_checkpointing_enable()
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert missing == []


def test_attentions_are_still_recorded() -> None:
    model, _ = convert_to_mla(HOSTS["llama"](), kv_keep=0.5, calibration=CALIBRATION)
    model.set_attn_implementation("eager")
    weights = model(input_ids=PROMPT, output_attentions=True).attentions
    assert len(weights) == 2 and weights[0].shape == (2, 4, 24, 24)


def test_tied_weights_and_modes_stay() -> None:
    model = build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, tie_word_embeddings=True).to(torch.bfloat16)
    model.requires_grad_(False)
    model, _ = convert_to_mla(model, kv_keep=0.5, calibration=CALIBRATION)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())


def test_a_component_in_few_complex_dimensions_is_found() -> None:
    """Heads whose keys are one complex number turned by a phase of each head's own: complex rank 1, real rank 2."""
    model = build(LlamaForCausalLM, LlamaConfig, torch.float64, num_key_value_heads=4)
    for layer in model.model.layers:
        weight = layer.self_attn.k_proj.weight.data.view(4, 2, 8, 64)
        for head, angle in enumerate((0.3, 1.1, 2.0)):
            real, imaginary = weight[3, 0].clone(), weight[3, 1].clone()
            c, s = torch.tensor(angle).cos(), torch.tensor(angle).sin()
            weight[head, 0], weight[head, 1] = c * real - s * imaginary, c * imaginary + s * real
    original = copy.deepcopy(model)
    model, report = convert_to_mla(model, qk_rope_head_dim=16, kv_lora_rank=64, calibration=CALIBRATION)
    assert max(layer.error for layer in report.layers) < 1e-6
    assert torch.allclose(logits(model), logits(original), atol=1e-3)
    _, real = convert_to_mla(original, qk_rope_head_dim=16, kv_lora_rank=64, calibration=CALIBRATION, method="transmla")
    assert min(layer.error for layer in real.layers) > 1e-3


def test_equal_heads_need_one_share() -> None:
    """Four KV heads that are one: a quarter of the bytes loses nothing."""
    model = build(LlamaForCausalLM, LlamaConfig, torch.float64, num_key_value_heads=4)
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight.data = linear.weight.data[:16].repeat(4, 1)
    model, report = convert_to_mla(model, qk_rope_head_dim=16, kv_lora_rank=16, calibration=CALIBRATION)
    assert max(layer.error for layer in report.layers) < 1e-10
    assert report.kept == 0.25


def test_components_commute_with_the_rotation() -> None:
    model = HOSTS["mha"](torch.float64)
    found = inspect_hosts(model)
    moments = collect(model, found, CALIBRATION)
    components = Components(found[0], moments[found[0].name])
    product = components.synthesise @ components.analyse
    assert torch.allclose(product, torch.eye(4, dtype=product.dtype).expand_as(product), atol=1e-9)


@pytest.mark.parametrize("host", ["llama", "qwen2", "qwen3", "mha"])
def test_better_than_the_baselines(host) -> None:
    model = HOSTS[host]()
    error = {}
    for method in ("complex", "transmla", "freqfold", "svd"):
        sizes = {"qk_rope_head_dim": 16, "kv_lora_rank": 24}
        _, report = convert_to_mla(copy.deepcopy(model), calibration=CALIBRATION, method=method, **sizes)
        error[method] = sum(layer.error for layer in report.layers)
    assert error["complex"] < min(error["transmla"], error["freqfold"])
    assert error["complex"] < error["svd"]


def test_uniform_gives_all_layers_the_same_frequencies_and_sizes() -> None:
    model, report = convert_to_mla(HOSTS["mha"](), kv_keep=0.5, calibration=CALIBRATION, rotary="uniform")
    first, second = (m for _, m in convert_module_modules(model))
    assert torch.equal(first.frequencies, second.frequencies)
    assert len({(layer.kv_lora_rank, layer.qk_rope_head_dim) for layer in report.layers}) == 1


def test_moments_in_several_passes_are_the_same(monkeypatch) -> None:
    model = HOSTS["llama"](torch.float64)
    whole, _ = convert_to_mla(copy.deepcopy(model), qk_rope_head_dim=16, kv_lora_rank=32, calibration=CALIBRATION)
    monkeypatch.setattr(convert_module, "MOMENT_BYTES", 1)
    pieces, _ = convert_to_mla(model, qk_rope_head_dim=16, kv_lora_rank=32, calibration=CALIBRATION)
    assert torch.allclose(whole.model.layers[0].self_attn.q_proj.weight, pieces.model.layers[0].self_attn.q_proj.weight)
    # Later layers see what the converted ones before them give.
    assert float((logits(whole) - logits(pieces)).abs().max()) < 0.5 * float(logits(whole).abs().max())


def test_latents_have_unit_mean_square() -> None:
    model, _ = convert_to_mla(HOSTS["llama"](), kv_keep=0.5, calibration=CALIBRATION)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=CALIBRATION[-1], past_key_values=cache)
    for layer in cache.layers:
        assert float(layer.keys.square().mean()) == pytest.approx(1, rel=0.2)


def test_text_is_cut_into_windows() -> None:
    class Tokenizer:
        def __call__(self, text, verbose=True):
            return {"input_ids": [3 + ord(c) % 90 for c in text]}

    model = HOSTS["llama"]()
    _, report = convert_to_mla(
        model, kv_keep=0.5, calibration=["some words " * 40, "and others " * 40], tokenizer=Tokenizer()
    )
    assert report.calibration_tokens == 880 // 256 * 256
    assert "of the bytes" in str(report) and report.to_dict()["kept"] == report.kept


def test_plans() -> None:
    config = LlamaConfig(**SMALL | {"num_key_value_heads": 2, "head_dim": 64})
    plan = plan_mla(config, 0.5)
    assert (plan.kv_lora_rank + plan.qk_rope_head_dim) / 256 == plan.kept == 0.5
    assert plan.qk_rope_head_dim == 40
    assert plan_mla(config, 1.0).qk_rope_head_dim == 128
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="kv_keep"):
            plan_mla(config, bad)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kv_keep": 0}, "kv_keep"),
        ({"kv_keep": 0.5, "kv_lora_rank": 8, "qk_rope_head_dim": 8}, "not all three"),
        ({"qk_rope_head_dim": 7}, "even"),
        ({"qk_rope_head_dim": 34}, "from 2 to 32"),
        ({"qk_rope_head_dim": 16, "kv_lora_rank": 49}, "from 1 to 48"),
        ({"kv_keep": 0.5, "kv_lora_rank": 32}, "leave 0"),
        ({"method": "magic"}, "method"),
        ({"rotary": "magic"}, "rotary"),
        ({"calibration": None}, "calibration"),
        ({"calibration": []}, "empty"),
        ({"calibration": ["text"]}, "tokenizer"),
        ({"calibration": [torch.tensor([[200] * 20])]}, "vocabulary"),
        ({"calibration": [torch.tensor([[5] * 3])]}, "at least"),
        ({"calibration": [torch.rand(2, 20)]}, "token ids"),
        ({"calibration": [{"input_ids": PROMPT, "attention_mask": MASK}]}, "padding"),
    ],
)
def test_bad_arguments(arguments, match) -> None:
    model = HOSTS["llama"]()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        convert_to_mla(model, **{"calibration": CALIBRATION} | arguments)
    assert type(model) is LlamaForCausalLM
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_converted_model_is_refused() -> None:
    model, _ = convert_to_mla(HOSTS["llama"](), kv_keep=0.5, calibration=CALIBRATION)
    with pytest.raises(ValueError, match="converted already"):
        convert_to_mla(model, kv_keep=0.5, calibration=CALIBRATION)
    with pytest.raises(ValueError, match="expected a transformers model"):
        convert_to_mla(nn.Linear(2, 2), kv_keep=0.5, calibration=CALIBRATION)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)), "q_proj"),
        (lambda: build(GlmForCausalLM, GlmConfig, num_key_value_heads=2, head_dim=16), "rotates only a part"),
        (lambda: build(Olmo2ForCausalLM, Olmo2Config, num_key_value_heads=2), "way that is not known"),
        (lambda: build(PhiForCausalLM, PhiConfig, num_key_value_heads=2), "q_proj"),
        (
            lambda: build(
                GptOssForCausalLM,
                GptOssConfig,
                num_key_value_heads=2,
                head_dim=16,
                num_local_experts=2,
                num_experts_per_tok=1,
            ),
            "s_aux",
        ),
    ],
)
def test_models_that_are_not_known(make, match) -> None:
    model = make().eval()
    implementation = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=match):
        convert_to_mla(model, kv_keep=0.5, calibration=CALIBRATION)
    assert model.config._attn_implementation == implementation


def test_quantized_and_absent_weights_are_refused() -> None:
    class Linear8(nn.Linear):
        pass

    model = HOSTS["llama"]()
    model.model.layers[1].self_attn.k_proj = Linear8(64, 32, bias=False)
    with pytest.raises(NotImplementedError, match=r"layers.1.self_attn.k_proj is a Linear8"):
        convert_to_mla(model, kv_keep=0.5, calibration=CALIBRATION)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(NotImplementedError, match="not in memory"):
        convert_to_mla(model, kv_keep=0.5, calibration=CALIBRATION)


def test_names() -> None:
    assert {"convert_to_mla", "plan_mla"} <= set(hf_kvcache.__all__)


def test_smollm2_loses_nothing_at_full_sizes_saved_and_loaded(smollm2, tmp_path) -> None:
    model, tokenizer = smollm2
    text = "A converted model caches one latent for each token. At full sizes nothing is lost: the capital of France is"
    ids = tokenizer(text, return_tensors="pt").input_ids
    arguments = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    exact, tokens = logits(model, ids), model.generate(ids, **arguments)
    generator = torch.Generator().manual_seed(0)
    calibration = [torch.randint(0, 49152, (1, 64), generator=generator) for _ in range(2)]
    converted, report = convert_to_mla(copy.deepcopy(model), kv_keep=1.0, calibration=calibration)
    assert report.kept == 1.0
    converted.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for made in (converted, enable_absorb(loaded)):
        assert float((logits(made, ids) - exact).abs().max()) <= 1e-3
        assert torch.equal(made.generate(ids, **arguments), tokens)
