"""The patch: followers without projections of their own, in every kind of pass; and a model that is as it was after."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract.common import assert_close, batch, feed, generate
from contract.test_sharing import Oracle, _built, deeper, stock_of
from torch import nn
from transformers import DynamicCache, StaticCache

from hf_kvcache import CrossLayerSharedCache, KVCache, SnapKVCache
from hf_kvcache.compat.shrink import build
from patches.cross_layer import apply, shared_layers

BLOCKS = [18, 1, 1, 5, 1]
PAIRS = {1: 0, 3: 2}
CASES = ["llama", "qwen2", "gemma3", "gpt_oss"]


def fresh(name: str, attention: str = "sdpa") -> Any:
    model = copy.deepcopy(_built(name))
    model.config._attn_implementation_internal = "eager" if name == "gpt_oss" else attention
    return model


def snapshot(model: nn.Module) -> list[Any]:
    """Whatever a patch could leave behind."""
    found: list[Any] = []
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        found += [name, type(module), sorted(own), own.get("forward"), len(module._forward_pre_hooks)]
        found += [len(module._forward_hooks), list(module._modules), list(module._parameters)]
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["shared cache", "DynamicCache", "no cache"])
def test_the_same_logits_with_less_to_compute(kind, name, attention):
    model, stock = fresh(name, attention), stock_of(name, attention)
    ids, mask = batch(3, more=8)
    before = snapshot(model)
    calls: list[int] = []
    with shared_layers(model, 2) as sharing:
        for layer, module in enumerate(model.model.layers):
            # A hook on the weights: who is asked for keys?
            module.self_attn.k_proj.register_forward_hook(
                lambda m, a, o, layer=layer: calls.append(layer) if o.any() else None
            )
        expected = feed(stock, Oracle(stock.config, sharing), ids, mask, BLOCKS, whole=True)
        if kind == "no cache":
            with torch.no_grad():
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                ours = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        else:
            cache = CrossLayerSharedCache(model) if kind == "shared cache" else DynamicCache(config=model.config)
            ours = feed(model, cache, ids, mask, BLOCKS, whole=True)
        real = mask.bool()
        assert_close(ours[real], expected[real])
        assert set(calls) == set(range(4)) - set(sharing)
    for module in model.model.layers:
        module.self_attn.k_proj._forward_hooks.clear()
    assert snapshot(model) == before
    assert_close(*(feed(each, DynamicCache(config=stock.config), ids, mask, BLOCKS) for each in (model, stock)))


@pytest.mark.parametrize(
    "mode", [{}, dict(num_beams=3), dict(prompt_lookup_num_tokens=4)], ids=["greedy", "beams", "drafts"]
)
def test_generate_with_and_without_a_cache_of_ours(mode):
    model, stock = fresh("llama"), stock_of("llama")
    ids, mask = batch(1 if "prompt_lookup_num_tokens" in mode else 3)
    expected = generate(stock, Oracle(stock.config, PAIRS), ids, mask, **mode)
    with shared_layers(model, 2):
        assert torch.equal(generate(model, CrossLayerSharedCache(model), ids, mask, **mode), expected)
        assert torch.equal(generate(model, DynamicCache(config=model.config), ids, mask, **mode), expected)
        assert torch.equal(generate(model, None, ids, mask, **mode), expected)


def test_policies_and_windows():
    model = fresh("gemma3")
    ids, mask = batch(3, more=8)
    make = [
        lambda m: SnapKVCache(m, 10, window_size=4, kernel_size=3, sharing={3: 1}),
        lambda m: CrossLayerSharedCache(m, scope="all"),
    ]
    for scope, cache in zip(("full", "all"), make, strict=True):
        expected = feed(model, cache(model), ids, mask, BLOCKS)
        with shared_layers(model, 2, scope):
            assert_close(feed(model, cache(model), ids, mask, BLOCKS), expected)


@pytest.mark.parametrize(
    "name", ["qwen3", "olmo2", "gemma3_text", "jamba", "llama4_text", "cohere", "granite", "smollm3"]
)
def test_other_models(name):
    """Norms of keys, rotations of other kinds, linear layers in between."""
    model = deeper(name)
    scope = "all" if name == "llama4_text" else "full"
    ids, mask = batch(2, more=8)
    ids = ids % model.config.vocab_size
    sharing = CrossLayerSharedCache(model, scope=scope).sharing
    expected = feed(model, Oracle(model.config, sharing), ids, mask, BLOCKS)
    with shared_layers(model, sharing, scope):
        assert_close(feed(model, CrossLayerSharedCache(model, sharing, scope=scope), ids, mask, BLOCKS), expected)
        assert_close(feed(model, DynamicCache(config=model.config), ids, mask, BLOCKS), expected)


def test_projections_joined_in_one_are_refused():
    with pytest.raises(NotImplementedError, match="no separate q_proj, k_proj, v_proj"):
        apply(build("phi3"), 2)


def test_gradients_flow_into_the_source():
    """Against a model whose attention functions exchange keys and values after rotation, written here by hand."""
    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    held: dict[int, Any] = {}

    def exchange(module, query, key, value, mask, **kwargs):
        held[module.layer_idx] = (key, value)
        key, value = held[PAIRS.get(module.layer_idx, module.layer_idx)]
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("test_exchange", exchange)
    ids, mask = batch(3)
    results = []
    for patched in (True, False):
        model = fresh("llama", "eager").train()
        if patched:
            undo = apply(model, 2)
        else:
            model.config._attn_implementation_internal = "test_exchange"
        # transformers makes a DynamicCache unless told otherwise
        for use_cache in (False, True) if patched else (False,):
            model.zero_grad()
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            labels = ids.masked_fill(mask == 0, -100)
            full = mask if patched else None
            if full is None:
                causal = torch.ones(18, 18, dtype=torch.bool).tril()[None, None] & mask[:, None, None].bool()
                full = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
            loss = model(ids, attention_mask=full, position_ids=positions, labels=labels, use_cache=use_cache).loss
            loss.backward()
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            results.append((float(loss.detach()), found))
        if patched:
            undo()
    for loss, found in results[:2]:
        assert abs(loss - results[2][0]) < 1e-4
        for name, grad in found.items():
            assert_close(grad, results[2][1][name])
        for layer in range(4):
            for which in ("k_proj", "v_proj"):
                assert (f"model.layers.{layer}.self_attn.{which}.weight" in found) == (layer not in PAIRS)


def test_gradient_checkpointing_is_refused():
    model = fresh("llama").train()
    model.gradient_checkpointing_enable()
    with shared_layers(model.eval(), 2):
        model.train()
        with pytest.raises(NotImplementedError, match="gradient_checkpointing_disable"):
            model(batch(1)[0], use_cache=False)


@pytest.mark.parametrize("made", ["KVCache", "another map", "StaticCache"])
def test_other_caches_are_refused_by_name(made):
    model = fresh("llama")
    cache: Any = {
        "KVCache": lambda: KVCache(model),
        "another map": lambda: CrossLayerSharedCache(model, {3: 1}),
        "StaticCache": lambda: StaticCache(config=model.config, max_cache_len=64),
    }[made]()
    ids, _ = batch(1)
    with shared_layers(model, 2):
        with pytest.raises((ValueError, NotImplementedError), match="sharing=.*undo the patch"):
            generate(model, cache, ids)
    if made != "StaticCache":
        cache.reset()
        generate(model, cache, ids)


def test_a_larger_map_in_the_cache_is_fine():
    model, stock = fresh("llama"), stock_of("llama")
    ids, mask = batch(3, more=8)
    with shared_layers(model, {3: 2}):
        ours = feed(model, CrossLayerSharedCache(model), ids, mask, BLOCKS)
    assert_close(ours, feed(stock, Oracle(stock.config, PAIRS), ids, mask, BLOCKS))


def test_undo_after_an_error_and_twice():
    model = fresh("llama")
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        with shared_layers(model, 2):
            raise KeyboardInterrupt
    assert snapshot(model) == before
    undo = apply(model, 2)
    with pytest.raises(ValueError, match="undo that first"):
        apply(model, {3: 1})
    undo()
    undo()
    assert snapshot(model) == before
    apply(model, {3: 1})()
    assert snapshot(model) == before


def test_a_forward_that_others_replaced_comes_back():
    """accelerate's hooks stand in the same place."""
    model = fresh("llama")
    projection = model.model.layers[1].self_attn.k_proj
    inner = projection.forward
    projection.forward = lambda x: inner(x)
    mine = projection.forward
    with shared_layers(model, 2):
        assert projection.forward is not mine
    assert projection.forward is mine


def test_weights_keep_their_names_and_a_copy_keeps_nothing_of_the_model():
    model = fresh("llama")
    names = list(model.state_dict())
    with shared_layers(model, 2):
        assert list(model.state_dict()) == names
        assert [name for name, _ in model.named_parameters()] == list(dict(fresh("llama").named_parameters()))


def test_lora():
    peft = pytest.importorskip("peft")
    model = fresh("llama")
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], layers_to_transform=[0, 2], init_lora_weights=False),
    )
    ids, mask = batch(3, more=8)
    expected = feed(wrapped, Oracle(model.config, PAIRS), ids, mask, BLOCKS)
    with shared_layers(wrapped, 2):
        assert_close(feed(wrapped, CrossLayerSharedCache(wrapped), ids, mask, BLOCKS), expected)
        wrapped.train()
        wrapped(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
        assert {name for name, p in wrapped.named_parameters() if p.grad is not None} == trained
