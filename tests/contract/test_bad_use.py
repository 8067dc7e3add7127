"""Point 9: bad use is an error that names the argument and the fix, before any token."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertConfig, LlamaForCausalLM

from hf_kvcache import HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache, detach
from hf_kvcache.policies import SlidingWindow

from .common import CACHE, CACHES, EVICTING, MODELS, _config, batch, feed, generate, model_of, roomy, tight

ARGUMENTS = [
    (SlidingWindowCache, dict(window_length=0), "window_length"),
    (SlidingWindowCache, dict(window_length=-4), "window_length"),
    (SlidingWindowCache, dict(window_length=8.5), "window_length"),
    (SlidingWindowCache, dict(window_length=8, num_sink_tokens=-1), "num_sink_tokens"),
    (SnapKVCache, dict(max_capacity_prompt=0), "max_capacity_prompt"),
    (SnapKVCache, dict(max_capacity_prompt=16, window_size=0), "window_size"),
    (SnapKVCache, dict(max_capacity_prompt=16, window_size=16), "max_capacity_prompt.*window_size"),
    (SnapKVCache, dict(max_capacity_prompt=16, window_size=32), "raise it or shrink the window"),
    (SnapKVCache, dict(max_capacity_prompt=64, kernel_size=4), "kernel_size.*odd"),
    (SnapKVCache, dict(max_capacity_prompt=64, kernel_size=-1), "kernel_size"),
    (SnapKVCache, dict(max_capacity_prompt=64, pooling="max"), "pooling.*maxpool"),
    (SnapKVCache, dict(max_capacity_prompt=64, pyramid_beta=0), "pyramid_beta"),
    (SnapKVCache, dict(max_capacity_prompt=64, decode_budget=0), "decode_budget"),
    (SnapKVCache, dict(max_capacity_prompt=64, group_reduce="sum"), "group_reduce"),
    (HeavyHitterCache, dict(heavy_size=0, recent_size=4), "heavy_size"),
    (HeavyHitterCache, dict(heavy_size=4, recent_size=-1), "recent_size"),
    (HeavyHitterCache, dict(heavy_ratio=0.0), "heavy_ratio.*\\(0, 1\\]"),
    (HeavyHitterCache, dict(recent_ratio=1.5), "recent_ratio.*\\(0, 1\\]"),
    (HeavyHitterCache, dict(heavy_ratio=-0.1), "heavy_ratio"),
    (HeavyHitterCache, dict(heavy_ratio=0.7, recent_ratio=0.7), "heavy_ratio \\+ recent_ratio"),
    (HeavyHitterCache, dict(heavy_size=4, heavy_ratio=0.1), "not both"),
    (HeavyHitterCache, dict(heavy_size=4, recent_size=4, num_sink_tokens=5), "num_sink_tokens.*heavy_size"),
    (KVCache, dict(scope="some"), "scope.*'full' or 'all'"),
    (KVCache, dict(policy="h2o"), "policy.*Policy"),
]


@pytest.mark.parametrize("kind, arguments, message", ARGUMENTS)
def test_impossible_arguments(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(model_of("llama"), **arguments)


@pytest.mark.parametrize("part", ["codec", "offload", "sharing"])
def test_parts_of_another_type_are_refused_by_name(part):
    with pytest.raises((ValueError, NotImplementedError), match=part):
        KVCache(model_of("llama"), **{part: object()})


@pytest.mark.parametrize("label", EVICTING)
def test_a_config_instead_of_the_model(label):
    with pytest.raises(ValueError, match=r"needs the model itself.*Cache\(model"):
        tight(label, model_of("llama").config)
    assert KVCache(model_of("llama").config).get_seq_length() == 0


@pytest.mark.parametrize("what", [None, "gpt2", torch.nn.Linear(2, 2)])
def test_neither_model_nor_config(what):
    with pytest.raises(ValueError, match="model or config"):
        KVCache(what)


@pytest.mark.parametrize("label", CACHES)
def test_encoder_only(label):
    with pytest.raises(ValueError, match="encoder-only.*is_decoder"):
        tight(label, BertConfig(num_hidden_layers=1))


@pytest.mark.parametrize("label", EVICTING)
def test_nothing_to_evict_from_is_said(label):
    with pytest.raises(NotImplementedError, match="scope='all'"):
        tight(label, model_of("mistral/all"), "mistral")


def test_a_policy_by_hand_equals_its_preset():
    """`SlidingWindow` finds the rotation of the sinks from the model, whoever makes it."""
    model = model_of("llama")
    ids, _ = batch(1, more=6)
    byhand, preset = KVCache(model, policy=SlidingWindow(6, 2)), SlidingWindowCache(model, 6, 2)
    assert byhand.kv_layers[0].policy.rotation is not None
    assert torch.equal(*(feed(model, cache, ids, blocks=[18, 1, 1, 1, 1, 1, 1]) for cache in (byhand, preset)))


@pytest.mark.parametrize("label", CACHES)
def test_a_second_model_of_another_shape(label):
    small = _config("llama")
    small.num_hidden_layers, small.num_key_value_heads = 2, 4
    other = LlamaForCausalLM(small).eval()
    ids, _ = batch(1)
    cache = tight(label, model_of("llama"))
    generate(model_of("llama"), cache, ids, max_new_tokens=2)
    KVCache(other)  # attached as well
    with pytest.raises(ValueError, match="another model|made for a model|cache for each model"):
        generate(other, cache, ids.repeat(1, 2), max_new_tokens=2)
    small = _config("llama")
    small.num_hidden_layers = 3
    deeper = LlamaForCausalLM(small).eval()
    # (An evicting cache says so at the first layer, because this model is not attached.)
    with pytest.raises((ValueError, NotImplementedError), match="cache for each model"):
        generate(deeper, tight(label, model_of("llama")), ids, max_new_tokens=2)


@pytest.mark.parametrize("label", CACHES)
def test_a_batch_that_changes_without_reset(label):
    model = model_of("llama")
    ids, _ = batch(3)
    cache = tight(label, model)
    feed(model, cache, ids)
    with pytest.raises(ValueError, match="reset.*batch_repeat_interleave"):
        feed(model, cache, ids[:2, :1])


@pytest.mark.parametrize("label", EVICTING)
def test_detached_while_in_use(label):
    model = copy.deepcopy(model_of("llama"))
    ids, _ = batch(1, more=2)
    cache = tight(label, model)
    feed(model, cache, ids[:, :18])
    detach(model)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="attach|detach|attention"):
        feed(model, cache, ids, blocks=[1, 1], start=18)


@pytest.mark.parametrize("case", MODELS)
def test_an_unknown_attention_extra(case):
    model = model_of(case)
    ids, _ = batch(1)
    with pytest.raises(NotImplementedError, match="`alien_bias`.*DynamicCache"), torch.no_grad():
        model(input_ids=ids, alien_bias=torch.ones(1), **{CACHE: roomy("kv", model, case)})


@pytest.mark.parametrize("repeats", [0, -1])
def test_batch_repeat_by_nothing(repeats):
    model = model_of("llama")
    cache = KVCache(model)
    feed(model, cache, batch(1)[0])
    with pytest.raises(ValueError, match="repeats"):
        cache.batch_repeat_interleave(repeats)


def test_positions_of_a_layer_left_to_transformers():
    with pytest.raises(ValueError, match="kv_layers"):
        KVCache(model_of("gemma3")).kept_positions(0)
