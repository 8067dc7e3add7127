"""Models that hold recurrent or convolution states beside keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_kvcache import HeavyHitterCache, KVCache, SnapKVCache, load
from hf_kvcache.compat.shrink import build, causal_lm_types

TYPES = [t for t in ("jamba", "falcon_h1", "lfm2", "qwen3_next", "zamba2", "gemma4_text") if t in causal_lm_types()]


@pytest.fixture(scope="module", params=TYPES)
def model(request: pytest.FixtureRequest):
    return build(request.param)


def turn(model, cache, ids):
    arguments = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **arguments)


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length))


@pytest.mark.parametrize("make", [KVCache, lambda m: HeavyHitterCache(m, 6, 4)], ids=["identity", "h2o"])
def test_reset_for_a_batch_of_another_size(model, make) -> None:
    ids, other = prompt(2, 12), prompt(3, 9)
    cache = make(model)
    turn(model, cache, ids)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(turn(model, cache, other), turn(model, make(model), other))


def test_two_turns_equal_dynamic_cache(model) -> None:
    ids = prompt(2, 12)
    cache, stock = KVCache(model), DynamicCache(config=model.config)
    first = turn(model, cache, ids)
    assert torch.equal(first, turn(model, stock, ids))
    history = torch.cat([first, prompt(2, 5)], dim=1)
    assert torch.equal(turn(model, cache, history), turn(model, stock, history))


@pytest.mark.parametrize("make", [KVCache, lambda m: SnapKVCache(m, 8, window_size=3)], ids=["identity", "snapkv"])
def test_states_are_saved_too(model, make, tmp_path) -> None:
    path = str(tmp_path / "cache.safetensors")
    cache = make(model)
    first = turn(model, cache, prompt(2, 12))
    cache.save(path)
    history = torch.cat([first, prompt(2, 5)], dim=1)
    loaded = load(path, model) if make is KVCache else make(model).load(path)
    assert torch.equal(turn(model, loaded, history), turn(model, cache, history))


def test_the_formula_follows_each_layer(model) -> None:
    cache = KVCache(model)
    ids = prompt(2, 12)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert sum(layer.nbytes for layer in cache.kv_layers) == cache.expected_bytes(model.config, 2, 12)
