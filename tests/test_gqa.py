"""Fewer KV heads in the same architecture: lossless where heads are copies, hosts, caches, checkpoints, refusals."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from test_mla_convert import CALIBRATION, HOSTS, MASK, PROMPT, SMALL, build, generate, ids_of, logits
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

import hf_kvcache
from hf_kvcache import HeavyHitterCache, KVCache, QuantizedKIVICache, convert_to_gqa, convert_to_mla
from hf_kvcache.gqa import convert as convert_module
from hf_kvcache.gqa import grouping
from hf_kvcache.gqa.keys import KeyFit
from hf_kvcache.mla.host import inspect_hosts
from hf_kvcache.mla.moments import collect

POOLED = ("llama", "mha", "yarn", "llama_bias", "qwen2", "qwen3", "gemma2", "gemma3", "mistral")
MODELS = {name: HOSTS[name] for name in POOLED} | {
    "stablelm": lambda dtype=torch.float32: build(
        StableLmForCausalLM, StableLmConfig, dtype, num_key_value_heads=4, use_qkv_bias=True
    )
}
models = pytest.mark.parametrize("name", list(MODELS))
METHODS = ("mean", "aligned", "fit")


def copies(name, groups, turned, dtype=torch.float64, tied=True, seed=1):
    """A model of four KV heads where those of a group are one; `turned`: by what commutes with the rotary embedding."""
    kwargs = {"num_key_value_heads": 4}
    if name == "qwen3":
        model = build(Qwen3ForCausalLM, Qwen3Config, dtype, head_dim=16, **kwargs)
    elif name == "stablelm":
        model = build(StableLmForCausalLM, StableLmConfig, dtype, use_qkv_bias=True, **kwargs)
    else:
        model = build(LlamaForCausalLM, LlamaConfig, dtype, attention_bias=name == "bias", **kwargs)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        attention = layer.self_attn
        rotary = 4 if name == "stablelm" else 16
        if name == "qwen3" and tied:
            for norm in (attention.q_norm, attention.k_norm):
                norm.weight.data[8:] = norm.weight.data[:8]
        for group in groups:
            for head in group[1:]:
                turn, spin = torch.eye(16, dtype=dtype), torch.eye(16, dtype=dtype)
                if turned:
                    half = rotary // 2
                    angles = torch.rand(half, generator=generator, dtype=dtype) * 6.28
                    if turned == "signs":
                        angles = torch.randint(2, (half,), generator=generator).to(dtype) * math.pi
                    f = torch.arange(half)
                    turn[f, f], turn[f + half, f + half] = angles.cos(), angles.cos()
                    turn[f, f + half], turn[f + half, f] = -angles.sin(), angles.sin()
                    spin = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=dtype))[0]
                for linear, map_ in ((attention.k_proj, turn), (attention.v_proj, spin)):
                    weight = linear.weight.data.view(4, 16, -1)
                    weight[head] = map_ @ weight[group[0]]
                    if linear.bias is not None:
                        bias = linear.bias.data.view(4, 16)
                        bias[head] = map_ @ bias[group[0]]
    return model


def attention_outputs(model, ids):
    """What every attention module makes of its input, in the model's own precision (norms between them round)."""
    found = []
    modules = [m for _, m in model.named_modules() if hasattr(m, "o_proj")]
    handles = [
        module.register_forward_hook(lambda m, a, k, out: found.append((a, k, out[0])), with_kwargs=True)
        for module in modules
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found, modules


def difference(found, model):
    modules = [m for _, m in model.named_modules() if hasattr(m, "o_proj")]
    worst = 0.0
    for (args, kwargs, expected), module in zip(found, modules, strict=True):
        with torch.no_grad():
            output = module(*args, **kwargs)[0]
        worst = max(worst, float((output - expected).abs().max() / expected.abs().max()))
    return worst


GROUPS = ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 1, 2, 3]])
COPIES = [
    *itertools.product(["llama"], GROUPS, [False, True], [torch.float64, torch.float32]),
    *itertools.product(["bias", "qwen3", "stablelm"], GROUPS[1:2], [False, True], [torch.float64]),
    *itertools.product(["bias", "qwen3", "stablelm"], GROUPS[2:], [True], [torch.float64, torch.float32]),
]


@pytest.mark.parametrize(("name", "groups", "turned", "dtype"), COPIES)
def test_copies_lose_nothing(name, groups, turned, dtype) -> None:
    """Permuted and turned ones too; plain means see neither."""
    model = copies(name, groups, turned, dtype)
    found, _ = attention_outputs(model, PROMPT)
    expected = logits(model)
    for method in METHODS:
        made, report = convert_to_gqa(copy.deepcopy(model), len(groups), CALIBRATION, method=method)
        apart = float((logits(made) - expected).abs().max() / expected.abs().max())
        if method == "mean" and (turned or groups == [[0, 3], [1, 2]]):
            assert apart > 0.01
            continue
        assert [layer.groups for layer in report.layers] == [groups] * 2
        # Qwen3 normalizes queries and keys in float32, whatever the model's dtype. Of single precision, biases that are
        # large against the weights take a digit.
        exact = dtype == torch.float64 and not (name == "qwen3" and turned)
        assert difference(found, made) <= (1e-12 if exact else 1e-6 if name == "llama" else 5e-6)
        assert apart <= 5e-6


def test_copies_are_found_without_calibration_of_their_own() -> None:
    """Directions that the calibration never saw are those of the weights."""
    model = copies("llama", [[0, 3], [1, 2]], True)
    found, _ = attention_outputs(model, PROMPT)
    for method in ("aligned", "fit"):
        made, _ = convert_to_gqa(copy.deepcopy(model), 2, [ids_of(3, 1, 16)], method=method)
        assert difference(found, made) <= 1e-9


def test_norms_with_a_gain_for_each_channel_commute_with_signs_alone() -> None:
    groups = [[0, 2], [1, 3]]
    for turned, exact in (("signs", True), (True, False)):
        model = copies("qwen3", groups, turned, tied=False)
        found, _ = attention_outputs(model, PROMPT)
        made, report = convert_to_gqa(copy.deepcopy(model), 2, CALIBRATION, method="aligned")
        assert [layer.groups for layer in report.layers] == [groups] * 2
        assert (difference(found, made) <= 1e-12) is exact
        plain, worse = convert_to_gqa(copy.deepcopy(model), 2, CALIBRATION, method="mean")
        errors = [sum(layer.error for layer in r.layers) for r in (report, worse)]
        assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_exactly_fewer(heads, method) -> None:
    model, report = convert_to_gqa(HOSTS["mha"](), heads, CALIBRATION, method=method)
    assert report.kept == heads / 4
    stock = DynamicCache(config=model.config)
    cache = KVCache(model)
    with torch.no_grad():
        model(input_ids=PROMPT, past_key_values=stock)
        model(input_ids=PROMPT, past_key_values=cache)
    assert cache.nbytes == cache.expected_bytes(model.config, 2, 24)
    for layer, entry in zip(stock.layers, report.layers, strict=True):
        assert layer.keys.shape == layer.values.shape == (2, heads, 24, 16)
        assert layer.keys.nbytes + layer.values.nbytes == 2 * 24 * entry.bytes_after
    attention = model.model.layers[0].self_attn
    assert attention.num_key_value_groups == 4 // heads
    assert attention.k_proj.weight.shape == (16 * heads, 64) and attention.k_proj.out_features == 16 * heads


@models
def test_generation_saved_and_loaded(name, tmp_path) -> None:
    """Eager, SDPA, left-padded rows, two turns, beams, our caches: all of them the plain model that was saved."""
    model, _ = convert_to_gqa(MODELS[name](), 1, CALIBRATION)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_key_value_heads"] == 1 and "auto_map" not in config
    for attention in ("eager",) if name == "gemma2" else ("eager", "sdpa"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
        assert type(loaded) is type(MODELS[name]())
        model.set_attn_implementation(attention)
        assert torch.equal(logits(model, mask=MASK), logits(loaded, mask=MASK))
        expected = generate(loaded)
        solo = loaded.generate(PROMPT[1:, 7:], max_new_tokens=10, do_sample=False, eos_token_id=None)
        assert torch.equal(expected[1, 24:], solo[0, 17:])
        assert torch.equal(generate(model), expected)
        assert torch.equal(generate(model, num_beams=3), generate(loaded, num_beams=3))
        cache = KVCache(model)
        assert torch.equal(generate(model, cache), expected)
        more = torch.cat([expected, ids_of(77, 2, 5)], dim=1)
        mask = torch.cat([MASK, torch.ones(2, more.shape[1] - MASK.shape[1], dtype=torch.long)], dim=1)
        arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        again = model.generate(more, past_key_values=cache, **arguments)
        assert torch.equal(again, loaded.generate(more, **arguments))
        model, loaded = loaded, model
    for other in (
        HeavyHitterCache(model, heavy_size=40, recent_size=40, scope="all"),
        QuantizedKIVICache(model, nbits=4, q_group_size=16, residual_length=64, scope="all"),
    ):
        assert torch.equal(generate(model, other), generate(model))


@models
@pytest.mark.parametrize("method", METHODS)
def test_the_reported_error_is_the_modules_own(name, method) -> None:
    model = MODELS[name](torch.float64)
    model.set_attn_implementation("eager")
    found, modules = attention_outputs(model, CALIBRATION[-1][:1])
    bias = [getattr(m.o_proj, "bias", None) for m in modules]
    bias = [None if b is None else b.detach().clone() for b in bias]
    model, report = convert_to_gqa(model, 1, CALIBRATION, method=method)
    modules = [m for _, m in model.named_modules() if hasattr(m, "o_proj")]
    for (args, kwargs, exact), module, entry, shift in zip(found, modules, report.layers, bias, strict=True):
        with torch.no_grad():
            off = module(*args, **kwargs)[0] - exact
        plain = exact if shift is None else exact - shift
        assert float(off.square().sum() / plain.square().sum()) == pytest.approx(entry.error, rel=1e-5)


@models
def test_better_than_means(name) -> None:
    error = {}
    for method in METHODS:
        _, report = convert_to_gqa(MODELS[name](), 1, CALIBRATION, method=method)
        error[method] = sum(layer.error for layer in report.layers)
    assert error["fit"] < error["aligned"] < error["mean"]


def test_the_fit_is_a_minimum_of_the_logits_error() -> None:
    """The closed forms against the logits themselves, and against maps nearby."""
    model = HOSTS["mha"](torch.float64)
    host = inspect_hosts(model)[0]
    moments = collect(model, [host], CALIBRATION)[host.name]
    keys = KeyFit(host, moments, moments.gram[:64, :64], torch.ones(4, dtype=torch.float64))
    members = [0, 2]
    start = keys.start(members)
    ask, share = keys.fit(members, *start, steps=2000)
    loss = keys.loss(members, ask, share)
    assert loss < keys.loss(members, *start) < keys.energy(members)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise = [
            keys.complex(torch.randn(2, 16, 16, generator=generator, dtype=torch.float64) * 1e-2) for _ in range(2)
        ]
        assert keys.loss(members, ask + noise[0], share) > loss
        assert keys.loss(members, ask, share + noise[1]) > loss
    # The loss is what independent queries, keys and distances give.
    query_root = torch.linalg.cholesky(moments.queries + 1e-12 * torch.eye(16))
    key_root = torch.linalg.cholesky(moments.gram[:64, :64] + 1e-12 * torch.eye(64))
    real_ask, real_share = keys.real(ask), keys.real(share)
    total = 0.0
    count = 20000
    k = torch.randn(count, 64, generator=generator, dtype=torch.float64) @ key_root.t()
    shared = sum(k.view(-1, 4, 16)[:, kv] @ real_share[i].t() for i, kv in enumerate(members))
    for i, head in enumerate(members):
        q = torch.randn(count, 16, generator=generator, dtype=torch.float64) @ query_root[head].t()
        distance = torch.multinomial(moments.distance[head], count, replacement=True, generator=generator)
        phase = moments.phases[distance].conj()

        def logit(q, k, phase=phase):
            product = torch.complex(q[:, :8], q[:, 8:]) * torch.complex(k[:, :8], k[:, 8:]).conj()
            return (product * phase).real.sum(1)

        total += float((logit(q, k.view(-1, 4, 16)[:, head]) - logit(q @ real_ask[i].t(), shared)).square().mean())
    assert total == pytest.approx(loss, rel=0.1)


def test_grouping() -> None:
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(6, 6, generator=generator, dtype=torch.float64)
    costs = costs + costs.t()
    best = min(
        ([sorted(p[:3]), sorted(p[3:])] for p in itertools.permutations(range(6))),
        key=lambda groups: sum(float(costs[g][:, g].sum() - costs[g, g].sum()) for g in groups),
    )
    costs.fill_diagonal_(0)
    assert grouping.choose(costs, 3) == sorted(best)
    # Too many to try all: clusters are found nevertheless.
    of = torch.randperm(32, generator=generator) % 8
    costs = (of[:, None] != of).double() + 0.1 * torch.rand(32, 32, generator=generator, dtype=torch.float64)
    costs = (costs + costs.t()).fill_diagonal_(0)
    found = grouping.choose(costs, 4)
    assert all(len({int(of[head]) for head in group}) == 1 for group in found)
    assert sorted(sum(found, [])) == list(range(32))


def test_parts_are_the_same_as_one(monkeypatch) -> None:
    model = HOSTS["mha"](torch.float64)
    whole, _ = convert_to_gqa(copy.deepcopy(model), 2, CALIBRATION)
    monkeypatch.setattr(convert_module, "MOMENT_BYTES", 1)
    parts, _ = convert_to_gqa(model, 2, CALIBRATION)
    first = [m.model.layers[0].self_attn for m in (whole, parts)]
    assert torch.allclose(first[0].k_proj.weight, first[1].k_proj.weight)
    assert torch.allclose(first[0].o_proj.weight, first[1].o_proj.weight)


def test_tied_weights_modes_and_training() -> None:
    model = build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=4, tie_word_embeddings=True).to(torch.bfloat16)
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    model.train()
    model, _ = convert_to_gqa(model, 2, CALIBRATION)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    trained = {name.split(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"0"}
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    assert all(bool(p.grad.any()) for p in model.model.layers[0].parameters())


def test_without_calibration_plain_means() -> None:
    model = HOSTS["mha"]()
    old = copy.deepcopy(model)
    model, report = convert_to_gqa(model, 2)
    for attention, before in zip(model.model.layers, old.model.layers, strict=True):
        for part in ("k_proj", "v_proj"):
            mean = getattr(before.self_attn, part).weight.view(2, 2, 16, 64).mean(1).flatten(0, 1)
            assert torch.allclose(getattr(attention.self_attn, part).weight, mean, atol=1e-7)
        for part in ("q_proj", "o_proj"):
            assert torch.equal(getattr(attention.self_attn, part).weight, getattr(before.self_attn, part).weight)
    assert report.method == "mean" and report.calibration_tokens == 0
    assert math.isnan(report.layers[0].error) and "50.0% of the bytes" in str(report)
    assert report.to_dict()["kept"] == 0.5


def test_conversions_follow_each_other() -> None:
    """The result is a model like any other: it can be converted further, or to latent attention."""
    model, _ = convert_to_gqa(HOSTS["mha"](), 2, CALIBRATION)
    half = logits(model)
    latent, _ = convert_to_mla(copy.deepcopy(model), kv_keep=1.0, calibration=CALIBRATION)
    assert float((logits(latent) - half).abs().max()) <= 1e-4
    model, report = convert_to_gqa(model, 1, CALIBRATION)
    assert report.kept == 0.5 and model.config.num_key_value_heads == 1
    with pytest.raises(ValueError, match="attends in latents"):
        convert_to_gqa(latent, 1, CALIBRATION)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_key_value_heads": 0}, r"one of \[1, 2\]"),
        ({"num_key_value_heads": 3}, r"one of \[1, 2\]"),
        ({"num_key_value_heads": 4}, r"one of \[1, 2\]"),
        ({"num_key_value_heads": 8}, r"one of \[1, 2\]"),
        ({"num_key_value_heads": True}, r"one of \[1, 2\]"),
        ({"num_key_value_heads": 0.5}, r"one of \[1, 2\]"),
        ({"method": "magic"}, "method"),
        ({"method": "fit", "calibration": None}, "needs `calibration`"),
        ({"method": "aligned", "calibration": None}, "needs `calibration`"),
        ({"calibration": []}, "empty"),
        ({"calibration": ["text"]}, "tokenizer"),
        ({"calibration": [torch.tensor([[200] * 20])]}, "vocabulary"),
    ],
)
def test_bad_arguments(arguments, match) -> None:
    model = HOSTS["mha"]()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        convert_to_gqa(model, **{"num_key_value_heads": 2, "calibration": CALIBRATION} | arguments)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.num_key_value_heads == 4


def test_one_head_already() -> None:
    with pytest.raises(ValueError, match="one KV head already"):
        convert_to_gqa(HOSTS["mqa"](), 1)
    with pytest.raises(ValueError, match="expected a transformers model"):
        convert_to_gqa(nn.Linear(2, 2), 1)


TINY_NEOX = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)), "q_proj"),
        (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**TINY_NEOX, num_attention_heads=4)), "fused projections"),
        (lambda: build(Phi3ForCausalLM, Phi3Config, num_key_value_heads=4), "fused projections"),
        (lambda: build(Olmo2ForCausalLM, Olmo2Config, num_key_value_heads=4), "way that is not known"),
        (
            lambda: build(StableLmForCausalLM, StableLmConfig, num_key_value_heads=4, qk_layernorm=True),
            "way that is not known",
        ),
    ],
)
def test_models_that_are_not_known(make, match) -> None:
    model = make().eval()
    with pytest.raises(NotImplementedError, match=match):
        convert_to_gqa(model, 2, CALIBRATION)


def test_quantized_absent_and_shared_weights_are_refused() -> None:
    class Linear8(nn.Linear):
        pass

    model = HOSTS["mha"]()
    model.model.layers[1].self_attn.k_proj = Linear8(64, 64, bias=False)
    with pytest.raises(NotImplementedError, match=r"layers.1.self_attn.k_proj is a Linear8"):
        convert_to_gqa(model, 2, CALIBRATION)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(NotImplementedError, match="not in memory"):
        convert_to_gqa(model, 2, CALIBRATION)
    model = HOSTS["mha"]()
    model.model.layers[1].self_attn.v_proj.weight = model.model.layers[0].self_attn.v_proj.weight
    with pytest.raises(NotImplementedError, match="are one weight"):
        convert_to_gqa(model, 2, CALIBRATION)


def test_names() -> None:
    assert "convert_to_gqa" in hf_kvcache.__all__
