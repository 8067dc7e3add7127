"""Absorbed attention: what a model with latent attention gives is the same whether its latents are expanded or not.

The contract matrix (`tests/contract`, case "deepseek_v3/absorb") holds every cache and operation against transformers'
own cache. Here: every family, both sides of a step, weights that change, what is refused, codecs, and bytes.
"""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, Mistral4Config, Mistral4ForCausalLM

from hf_kvcache import (
    CPUOffloadedCache,
    HeavyHitterCache,
    KVCache,
    QuantizedKIVICache,
    SlidingWindowCache,
    SnapKVCache,
    attach,
    disable_absorb,
    enable_absorb,
)
from hf_kvcache.codecs import KIVI, Float8, Latent, Rotated
from hf_kvcache.compat import shrink
from hf_kvcache.mla import absorb, attention
from hf_kvcache.mla.weights import Decoded, halves_of

TYPES = (
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "sarvam_mla",
    "youtu",
)
WITH_INDEXER = ("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4")


def is_there(kind):
    return kind == "mistral4" or kind in shrink.causal_lm_types()


@functools.cache
def _built(kind, attention_):
    if kind == "mistral4":
        model = Mistral4ForCausalLM._from_config(shrink._shrink(Mistral4Config()), attn_implementation=attention_)
        shrink._spread_weights(model, 0)
        return model.eval()
    return shrink.build(kind, attn_implementation=attention_)


def model_of(kind="deepseek_v3", attention_="sdpa"):
    return copy.deepcopy(_built(kind, attention_))


def latent_modules(model):
    return absorb.latent_modules(model)


@pytest.fixture(params=["by cost", "always absorbed"])
def side(request, monkeypatch):
    if request.param == "always absorbed":
        monkeypatch.setattr(attention, "is_cheaper", lambda *_: True)
    return request.param


def stock_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@torch.no_grad()
def feed(model, cache, inputs, blocks):
    """Logits of all real tokens, the text given in blocks."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    name = shrink.cache_argument(model)
    out, start = [], 0
    for size in blocks:
        stop = start + size
        step = dict(attention_mask=mask[:, :stop], position_ids=positions[:, start:stop], use_cache=True)
        out.append(model(input_ids=ids[:, start:stop], **step, **{name: cache}).logits)
        start = stop
    return torch.cat(out, dim=1)[mask[:, :start].bool()]


def text(model, rows=2, length=24):
    return shrink.sample_inputs(model, batch=rows, length=length)


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max())


BLOCKS = [9, 1, 4, 1, 5]


# ---------------------------------------------------------------------- every family


@pytest.mark.parametrize("attention_,always", [("sdpa", False), ("sdpa", True), ("eager", True)])
@pytest.mark.parametrize("kind", TYPES)
def test_absorbed_equals_expanded(kind, attention_, always, monkeypatch):
    """A left-padded batch: logits of prompts, steps and chunks, and greedy tokens."""
    if always:
        monkeypatch.setattr(attention, "is_cheaper", lambda *_: True)
    if not is_there(kind):
        pytest.skip("not in this version of transformers")
    stock, model = model_of(kind, attention_), enable_absorb(model_of(kind, attention_))
    inputs = text(model)
    wanted = feed(stock, stock_cache(stock), inputs, BLOCKS)
    for cache in (KVCache(model), stock_cache(model)):
        assert difference(feed(model, cache, inputs, BLOCKS), wanted) < 1e-5
    name, greedy = shrink.cache_argument(model), dict(max_new_tokens=8, do_sample=False)
    tokens = stock.generate(**inputs, **greedy, **{name: stock_cache(stock)})
    assert torch.equal(model.generate(**inputs, **greedy, **{name: KVCache(model)}), tokens)


@pytest.mark.parametrize("kind", TYPES)
def test_disable_restores_every_bit(kind):
    if not is_there(kind):
        pytest.skip("not in this version of transformers")
    model = model_of(kind)
    inputs = text(model)
    before = [dict(vars(module)) for module in latent_modules(model)]
    wanted = feed(model, stock_cache(model), inputs, BLOCKS)
    assert enable_absorb(enable_absorb(model)) is model
    cache = KVCache(model)
    feed(model, cache, inputs, BLOCKS)
    assert disable_absorb(disable_absorb(model)) is model
    assert [dict(vars(module)) for module in latent_modules(model)] == before
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(feed(model, stock_cache(model), inputs, BLOCKS), wanted)


@pytest.mark.parametrize("kind", ["kimi_linear", "longcat_flash"])
def test_turns_beams_and_chunks_of_other_layouts(kind):
    stock, model = model_of(kind), enable_absorb(model_of(kind))
    name = shrink.cache_argument(model)
    for mode in (dict(num_beams=3), dict(do_sample=False, prefill_chunk_size=5)):
        if kind == "kimi_linear" and "prefill_chunk_size" in mode:
            continue  # its linear layers differ by chunk in transformers' own cache too
        both = [m.generate(**text(m), max_new_tokens=6, **mode, **{name: c})
                for m, c in ((stock, stock_cache(stock)), (model, KVCache(model)))]  # fmt: skip
        assert torch.equal(*both), mode
    states = []
    for this, cache in ((stock, stock_cache(stock)), (model, KVCache(model))):
        ids, mask = text(this).values()
        for _ in range(2):
            ids = this.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **{name: cache})
            ids = torch.cat([ids, ids[:, 3:6]], dim=1)
            mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], dim=1)
        states.append(ids)
    assert torch.equal(*states)


def test_decoding_expands_nothing():
    model = enable_absorb(model_of())
    calls = []
    for module in latent_modules(model):
        original = module.kv_b_proj.forward
        module.kv_b_proj.forward = lambda x, original=original: calls.append(x.shape) or original(x)
    for cache in (KVCache(model), stock_cache(model)):
        feed(model, cache, text(model), [20])
        calls.clear()
        feed(model, cache, text(model), [1, 1, 2])
        assert calls == []


def test_each_step_takes_the_cheaper_side():
    module = latent_modules(model_of())[0]
    module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim = 512, 64, 128, 128
    assert attention.is_cheaper(1, 1, module) is False  # nothing to gain
    assert attention.is_cheaper(1, 100, module) and attention.is_cheaper(128, 4096, module)
    assert not attention.is_cheaper(4096, 4096, module) and not attention.is_cheaper(256, 4096, module)


def test_output_attentions_of_the_eager_implementation():
    stock, model = model_of(attention_="eager"), enable_absorb(model_of(attention_="eager"))
    inputs, results = text(model), []
    for this, cache in ((stock, stock_cache(stock)), (model, KVCache(model)), (model, stock_cache(model))):
        feed(this, cache, inputs, [20])
        with torch.no_grad():
            step = dict(attention_mask=inputs["attention_mask"][:, :22], output_attentions=True)
            name = shrink.cache_argument(this)
            results.append(this(input_ids=inputs["input_ids"][:, 20:22], **step, **{name: cache}).attentions)
    for ours in results[1:]:
        for a, b in zip(ours, results[0], strict=True):
            assert a.shape == b.shape and float((a - b).abs().max()) < 1e-5


def test_other_implementations_expand_as_before():
    """While another attention is set, latents would be misread: the model expands, and is what it was."""
    stock, model = model_of(), enable_absorb(model_of())
    model.config._attn_implementation_internal = "eager"
    stock.config._attn_implementation_internal = "eager"
    inputs = text(model)
    wanted = feed(stock, stock_cache(stock), inputs, BLOCKS)
    assert torch.equal(feed(model, stock_cache(model), inputs, BLOCKS), wanted)


def test_a_model_that_was_attached_stays_attached():
    model = attach(model_of())
    disable_absorb(enable_absorb(model))
    assert model.config._attn_implementation == "hf_kvcache"


def test_a_copy_of_the_model_is_a_model_of_its_own():
    model = enable_absorb(model_of())
    twin = copy.deepcopy(model)
    inputs = text(model)
    with torch.no_grad():
        for module in latent_modules(twin):
            module.kv_b_proj.weight.mul_(1.5)
    stock = disable_absorb(copy.deepcopy(twin))
    wanted = feed(stock, stock_cache(stock), inputs, BLOCKS)
    assert difference(feed(twin, KVCache(twin), inputs, BLOCKS), wanted) < 1e-5
    assert difference(feed(model, KVCache(model), inputs, BLOCKS), wanted) > 1e-2


def test_a_pickled_model_expands_and_can_be_enabled_again():
    model = enable_absorb(model_of())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    inputs = text(model)
    wanted = feed(model, KVCache(model), inputs, BLOCKS)
    assert difference(feed(again, KVCache(again), inputs, BLOCKS), wanted) < 1e-5
    enable_absorb(disable_absorb(again))
    assert difference(feed(again, KVCache(again), inputs, BLOCKS), wanted) < 1e-5


def test_a_cache_lives_through_both_forms():
    """The rows are the same: enabled and disabled between steps."""
    stock, model = model_of(), model_of()
    attach(model)
    inputs = text(model)
    wanted = feed(stock, stock_cache(stock), inputs, [9, 1, 1, 1, 1])
    cache, parts = KVCache(model), []
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12), (12, 13)):
        (enable_absorb if start % 2 else disable_absorb)(model)
        with torch.no_grad():
            step = dict(attention_mask=mask[:, :stop], position_ids=positions[:, start:stop])
            parts.append(model(ids[:, start:stop], **step, **{shrink.cache_argument(model): cache}).logits)
    assert difference(torch.cat(parts, 1)[mask[:, :13].bool()], wanted) < 1e-5


def test_bfloat16_and_autocast():
    stock, model = model_of().bfloat16(), enable_absorb(model_of().bfloat16())
    inputs = text(model)
    assert (
        difference(feed(model, KVCache(model), inputs, BLOCKS), feed(stock, stock_cache(stock), inputs, BLOCKS)) < 0.1
    )
    stock, model = model_of(), enable_absorb(model_of())
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (feed(m, c, inputs, BLOCKS) for m, c in ((model, KVCache(model)), (stock, stock_cache(stock))))
    assert difference(ours.float(), theirs.float()) < 0.1


# ---------------------------------------------------------------------- weights


def test_changed_weights_show_at_the_next_step():
    stock, model = model_of(), enable_absorb(model_of())
    inputs = text(model)
    feed(model, KVCache(model), inputs, BLOCKS)
    for this in (stock, model):
        for module in latent_modules(this):
            module.kv_b_proj.weight.data.mul_(0.5)  # counts no version
    wanted = feed(stock, stock_cache(stock), inputs, BLOCKS)
    assert difference(feed(model, KVCache(model), inputs, BLOCKS), wanted) < 1e-5


def lora(model, names=("first",), **kwargs):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["kv_b_proj", "q_proj", "q_b_proj", "o_proj"], **kwargs)
    wrapped = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config)
    torch.manual_seed(4)
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_B" in key or "lora_A" in key:
                parameter.normal_(0, 0.2)
    return wrapped.eval()


@pytest.mark.parametrize("enabled_first", [False, True])
def test_lora(enabled_first, side):
    stock = lora(model_of(), ("first", "second"))
    model = lora(enable_absorb(model_of()), ("first", "second")) if enabled_first else None
    model = model or enable_absorb(lora(model_of(), ("first", "second")))
    inputs, seen = text(stock), []

    def compare():
        wanted = feed(stock.base_model.model, stock_cache(stock), inputs, BLOCKS)
        ours = feed(model.base_model.model, KVCache(model), inputs, BLOCKS)
        assert difference(ours, wanted) < 1e-5
        assert all(difference(wanted, other) > 1e-3 for other in seen)
        seen.append(wanted)

    compare()
    for this in (stock, model):
        this.set_adapter("second")
    compare()
    for this in (stock, model):
        for key, parameter in this.named_parameters():
            if "kv_b_proj.lora_B.second" in key:
                parameter.data.add_(0.3)
    compare()
    with stock.disable_adapter(), model.disable_adapter():
        compare()
    for this in (stock, model):
        this.merge_adapter()
    seen.pop(-2)  # merged weights are what they were apart
    compare()
    seen.clear()
    with stock.disable_adapter(), model.disable_adapter():  # the first pass takes the merge back
        compare()
    name = shrink.cache_argument(model.base_model.model)
    both = [m.generate(**inputs, max_new_tokens=6, do_sample=False, **{name: c})
            for m, c in ((stock, stock_cache(stock)), (model, KVCache(model)))]  # fmt: skip
    assert torch.equal(*both)


def test_gradients_are_those_of_the_expanded_form():
    grads = []
    for model in (lora(model_of()), enable_absorb(lora(model_of()))):
        model.train()
        inputs = text(model)
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and any("kv_b_proj" in name for name in grads[0])
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name]), name


def test_hooks_on_the_projection_see_what_they_saw():
    model = enable_absorb(model_of())
    inputs, seen = text(model), []
    handles = [m.kv_b_proj.register_forward_hook(lambda *a: seen.append(a[2].shape)) for m in latent_modules(model)]
    cache = KVCache(model)
    feed(model, cache, inputs, [9, 1])
    assert len(seen) == 2 * len(handles)
    for handle in handles:
        handle.remove()
    feed(model, cache, inputs, [1])
    assert len(seen) == 2 * len(handles)


def test_offloaded_weights():
    """Weights that are loaded for a forward pass only are read through it."""
    accelerate = pytest.importorskip("accelerate")
    stock, model = model_of(), accelerate.cpu_offload(model_of(), torch.device("cpu"))
    enable_absorb(model)
    inputs = text(stock)
    wanted = feed(stock, stock_cache(stock), inputs, BLOCKS)
    assert difference(feed(model, KVCache(model), inputs, BLOCKS), wanted) < 1e-5


class Linear4bit(nn.Module):
    """A stand-in for bitsandbytes' layer: codes that only its forward pass can read, and its trap for training."""

    def __init__(self, linear):
        super().__init__()
        self.step = float(linear.weight.detach().abs().max()) / 100
        self.weight = nn.Parameter((linear.weight / self.step).round().to(torch.int8), requires_grad=False)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        self.repacked = False

    def forward(self, x):
        self.repacked |= not self.training and not torch.is_grad_enabled()
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.step)


def test_weights_in_4_bits():
    stock, model = model_of(), model_of()
    for this in (stock, model):
        for module in latent_modules(this):
            module.kv_b_proj = Linear4bit(module.kv_b_proj).eval()
    enable_absorb(model)
    assert not any(module.kv_b_proj.repacked or module.kv_b_proj.training for module in latent_modules(model))
    inputs = text(model)
    for _ in range(2):
        wanted = feed(stock, stock_cache(stock), inputs, BLOCKS)
        assert difference(feed(model, KVCache(model), inputs, BLOCKS), wanted) < 1e-5
        with torch.no_grad():
            for this in (stock, model):
                for module in latent_modules(this):
                    module.kv_b_proj.weight.div_(2, rounding_mode="trunc")


def test_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes")
    stock, model = wide(), wide()  # rows of whole blocks
    for this in (stock, model):
        for module in latent_modules(this):
            old = module.kv_b_proj
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
            module.kv_b_proj = new.to("cpu").eval()
    enable_absorb(model)
    inputs = long_text(2)
    wanted = feed(stock, stock_cache(stock), inputs, CODED_BLOCKS[:8])
    assert difference(feed(model, KVCache(model), inputs, CODED_BLOCKS[:8]), wanted) < 2e-2, float(
        difference(feed(model, KVCache(model), inputs, CODED_BLOCKS[:8]), wanted)
    )


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize("kind", WITH_INDEXER)
def test_indexers_are_refused_by_name(kind):
    if not is_there(kind):
        pytest.skip("not in this version of transformers")
    model = model_of(kind, None)
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=f"{type(model).__name__} chooses the tokens.*indexer"):
        enable_absorb(model)
    assert model.config._attn_implementation == before


def test_what_is_no_latent_attention_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no multi-head latent attention"):
        enable_absorb(shrink.build("llama"))
    for thing in (nn.Linear(2, 2), model_of().config, None):
        with pytest.raises(ValueError, match="expected a transformers model"):
            enable_absorb(thing)
    with pytest.raises(ValueError, match="this model has none"):
        KVCache(shrink.build("llama"), codec="latent-4")


def refused(model, message):
    with pytest.raises(NotImplementedError, match=message):
        enable_absorb(model)
    assert all("expand_kv" not in vars(module) for module in latent_modules(model))
    assert disable_absorb(model) is model


def test_projections_that_cannot_be_absorbed_are_refused_by_name():
    model = model_of()
    module = latent_modules(model)[-1]
    old = module.kv_b_proj
    module.kv_b_proj = nn.Linear(old.in_features, old.out_features, bias=True)
    refused(model, "bias")

    class Linear8bitLt(nn.Linear):
        pass

    module.kv_b_proj = Linear8bitLt(old.in_features, old.out_features, bias=False)
    refused(model, "Linear8bitLt.*disable_absorb")
    model = model_of()
    kind = type(latent_modules(model)[0])
    latent_modules(model)[0].__class__ = type(
        "Reversed", (kind,), {"expand_kv": lambda self, a, b: tuple(t.flip(1) for t in kind.expand_kv(self, a, b))}
    )
    refused(model, "Reversed expands its latents in a way that is not known")
    pytest.importorskip("peft")
    refused(lora(model_of(), use_dora=True).base_model.model, "merge_and_unload")


def test_an_adapter_of_another_kind_is_refused_when_it_comes_later():
    model = enable_absorb(model_of())
    wrapped = lora(model, use_dora=True)
    with pytest.raises(NotImplementedError, match="disable_absorb"):
        feed(wrapped.base_model.model, KVCache(wrapped), text(wrapped), [24])


# ---------------------------------------------------------------------- policies


@pytest.mark.parametrize("kind", [SnapKVCache, HeavyHitterCache, SlidingWindowCache])
def test_policies_choose_alike_in_both_forms(kind, side):
    """Scores come from the same attention, so the same tokens stay."""
    arguments = {SnapKVCache: dict(max_capacity_prompt=10, window_size=4, kernel_size=3, decode_budget=2),
                 HeavyHitterCache: dict(heavy_size=4, recent_size=4),
                 SlidingWindowCache: dict(window_length=6, num_sink_tokens=2)}[kind]  # fmt: skip
    plain, model = model_of(), enable_absorb(model_of())
    inputs = text(model)
    caches = [kind(this, **arguments) for this in (plain, model)]
    logits = [
        feed(this, cache, inputs, [16, 1, 1, 1, 1, 1]) for this, cache in zip((plain, model), caches, strict=True)
    ]
    for layer in range(len(caches[0].layers)):
        assert torch.equal(caches[0].kept_positions(layer), caches[1].kept_positions(layer))
    assert difference(logits[1], logits[0]) < 1e-5


@pytest.mark.parametrize("kind", [SnapKVCache, HeavyHitterCache, SlidingWindowCache])
def test_policies_over_packed_latents(kind):
    arguments = {SnapKVCache: dict(max_capacity_prompt=60, window_size=4, decode_budget=4),
                 HeavyHitterCache: dict(heavy_size=30, recent_size=30),
                 SlidingWindowCache: dict(window_length=60, num_sink_tokens=2)}[kind]  # fmt: skip
    plain, model = wide(), enable_absorb(wide())
    inputs = long_text(2)
    codec = Latent(4, residual_length=5, num_sink_tokens=2)
    caches = [kind(this, **arguments, codec=codec) for this in (plain, model)]
    blocks = [120, *[1] * 12]
    logits = [feed(this, cache, inputs, blocks) for this, cache in zip((plain, model), caches, strict=True)]
    assert all(cache.kv_layers[0].segments.has_packed for cache in caches)
    assert torch.equal(caches[0].kept_positions(0), caches[1].kept_positions(0))
    assert difference(logits[1], logits[0]) < 1e-5


@pytest.mark.parametrize("codec", [None, "latent-4"])
def test_caches_of_other_kinds(codec):
    """Offloaded rows, and copies of a sealed prompt."""
    stock, model = wide(layers=2), enable_absorb(wide(layers=2))
    inputs = long_text(2)
    blocks = [150, 1, 1, 1, 5, 1]
    wanted = feed(stock, KVCache(stock, codec=codec), inputs, blocks)
    away = CPUOffloadedCache(model, resident_length=16, codec=codec)
    assert difference(feed(model, away, inputs, blocks), wanted) < 2e-4
    cache = KVCache(model, codec=codec)
    feed(model, cache, inputs, [150])
    cache.seal()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    name = shrink.cache_argument(model)
    for twin in (copy.deepcopy(cache), copy.deepcopy(cache)):
        with torch.no_grad():
            step = dict(attention_mask=mask[:, :151], position_ids=(mask.cumsum(-1) - 1)[:, 150:151])
            last = model(ids[:, 150:151], **step, **{name: twin}).logits
            again = KVCache(stock, codec=codec)
            feed(stock, again, inputs, [150])
            right = stock(ids[:, 150:151], **step, **{name: again}).logits
        assert difference(last, right) < 2e-4


# ---------------------------------------------------------------------- codecs and bytes


def wide(tokens_dtype=torch.float32, layers=1, **changes):
    config = DeepseekV3Config(**dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=4, first_k_dense_replace=layers, kv_lora_rank=64,
        q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=32,
        v_head_dim=16, initializer_range=0.2, max_position_embeddings=8192, pad_token_id=0, eos_token_id=None,
    ) | changes)  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).to(tokens_dtype).eval()
    model.generation_config.pad_token_id = 0
    return model


CODECS = {
    "latent-4": Latent(4, residual_length=5, num_sink_tokens=2),
    "latent-3-lloyd-max": Latent(3, 4, residual_length=0, levels="lloyd-max", scale_bits=16),
    "latent-8": Latent(8, residual_length=7),
    "rotated": Rotated(4, residual_length=6),
    "kivi": KIVI(4, residual_length=6, num_sink_tokens=2, q_group_size=24),
    "kivi-2": KIVI(2, residual_length=0),
    "float8": Float8(residual_length=3),
}
CODED_BLOCKS = [90, 1, 1, 40, 1, 5, *[1] * 33]


def long_text(rows):
    ids = torch.randint(2, 96, (rows, sum(CODED_BLOCKS)), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 23 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("rows,attention_", [(1, "sdpa"), (3, "sdpa"), (3, "eager")])
@pytest.mark.parametrize("name", CODECS)
def test_packed_latents_are_attended_as_they_decode(name, rows, attention_, monkeypatch):
    """One layer, so that the codes of both forms are the same: then only the way of attending differs."""
    monkeypatch.setattr(attention, "is_cheaper", lambda *_: True)
    plain, model = wide(), wide()
    for this in (plain, model):
        this.config._attn_implementation_internal = attention_
    enable_absorb(model)
    inputs = long_text(rows)
    caches = [KVCache(this, codec=CODECS[name]) for this in (plain, model)]
    expanded, absorbed = (
        feed(this, cache, inputs, CODED_BLOCKS) for this, cache in zip((plain, model), caches, strict=True)
    )
    assert caches[1].kv_layers[0].segments.has_packed
    assert difference(absorbed, expanded) < 1e-5
    stock = wide()
    exact = feed(stock, stock_cache(stock), inputs, CODED_BLOCKS)
    assert difference(absorbed, exact) > 1e-4
    assert caches[0].nbytes == caches[1].nbytes


@pytest.mark.parametrize("name", ["latent-4", "kivi"])
def test_drafts_and_operations_over_packed_latents(name):
    """A draft that crosses the packing of a block gives what its tokens give one by one."""
    model = enable_absorb(wide(layers=2))
    inputs = long_text(1)
    single = feed(model, KVCache(model, codec=CODECS[name]), inputs, [90, *[1] * 40])[90:]
    cache = KVCache(model, codec=CODECS[name])
    cache.activate_past_recording()
    parts, start = [feed(model, cache, inputs, [90])], 90
    ids = inputs["input_ids"]
    while start < 130:
        with torch.no_grad():
            draft = ids[:, start : start + 8].clone()
            draft[:, 5:] = 7  # wrong from here on, so three are taken back
            positions = torch.arange(start, start + 8)[None]
            logits = model(draft, position_ids=positions, **{shrink.cache_argument(model): cache}).logits
        cache.crop(-3)
        parts.append(logits[0, :5])
        start += 5
    assert difference(torch.cat(parts[1:]), single[:40]) < 1e-5
    twin = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        name_ = shrink.cache_argument(model)
        step = dict(position_ids=torch.tensor([[start]]))
        both = model(ids[:, start : start + 1].expand(2, -1), **step, **{name_: cache}).logits
        alone = model(ids[:, start : start + 1], **step, **{name_: twin}).logits
    assert difference(both[:1], alone) < 1e-5 and difference(both[1:], alone) < 1e-5


def test_packed_latents_are_saved_and_loaded(tmp_path):
    from hf_kvcache import load

    model = enable_absorb(wide())
    inputs = long_text(2)
    cache = KVCache(model, codec="latent-4")
    feed(model, cache, inputs, [160])
    cache.save(str(tmp_path / "cache.safetensors"))
    again = load(str(tmp_path / "cache.safetensors"), model)
    assert isinstance(again.codec, Latent) and again.codec.describe() == cache.codec.describe()
    ids, mask = inputs["input_ids"][:, 160:161], inputs["attention_mask"][:, :161]
    with torch.no_grad():
        step = dict(attention_mask=mask, position_ids=(mask.cumsum(-1) - 1)[:, -1:])
        name = shrink.cache_argument(model)
        assert torch.equal(*(model(ids, **step, **{name: c}).logits for c in (cache, again)))


@pytest.mark.parametrize("kind", TYPES)
def test_the_cache_holds_rank_and_rope_elements_of_each_token(kind):
    if not is_there(kind):
        pytest.skip("not in this version of transformers")
    model = enable_absorb(model_of(kind))
    cache = KVCache(model)
    feed(model, cache, text(model), [20, 1, 1])
    config = model.config.get_text_config(decoder=True)
    for layer in cache.kv_layers:
        rows = layer.segments.rows
        assert rows.keys.numel() + rows.values.numel() == 2 * 22 * (config.kv_lora_rank + config.qk_rope_head_dim)
        assert set(rows.tensors()) == {"keys", "values", "positions"}


def test_bytes_of_latents_in_4_bits():
    """DeepSeek's own sizes at 4,096 tokens, exact window and slack included."""
    model = enable_absorb(wide(torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64))
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 1, 4096, 512, generator=generator).bfloat16()
    rope = torch.randn(1, 1, 4096, 64, generator=generator).bfloat16()
    cache = KVCache(model, codec="latent-4")
    cache.update(latent, rope, 0)
    cache.kv_layers[0].settle()
    dense = 4096 * (512 + 64) * 2
    assert cache.nbytes == cache.expected_bytes(model.config, 1, 4096, torch.bfloat16)
    assert cache.nbytes <= 0.33 * dense
    rows = cache.kv_layers[0].segments.rows
    error = (rows.keys - latent).float().norm() / latent.float().norm()
    rope_error = (rows.values - rope).float().norm() / rope.float().norm()
    assert error < 0.11 and rope_error < 0.02


def test_kivi_cache_over_latents():
    model = enable_absorb(wide(layers=2))
    cache = QuantizedKIVICache(model, nbits=4, residual_length=16)
    out = model.generate(**long_text(2), max_new_tokens=8, do_sample=False, **{shrink.cache_argument(model): cache})
    assert out.shape == (2, sum(CODED_BLOCKS) + 8) and cache.kv_layers[0].segments.has_packed


def test_halves_are_views():
    module = latent_modules(model_of())[0]
    halves = halves_of(module, Decoded(), torch.float32)
    assert halves.weight.data_ptr() == module.kv_b_proj.weight.data_ptr() and not halves.terms
