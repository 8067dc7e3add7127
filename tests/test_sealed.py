"""Sealed segments: read-only rows that copies of a cache share, and attention merged over several segments."""

from __future__ import annotations

import copy

import pytest
import torch
from test_storage import IDS, MASK, gemma3, llama, turn
from transformers import DynamicCache

from hf_kvcache import KVCache, SnapKVCache

POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)


def read(model, cache, start, stop):
    with torch.no_grad():
        model(
            input_ids=IDS[:, start:stop],
            attention_mask=MASK[:, :stop],
            position_ids=POSITIONS[:, start:stop],
            past_key_values=cache,
        )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, gemma3], ids=["llama", "gemma3"])
def test_continuations_share_the_prompt(attention, make) -> None:
    model = make()
    model.set_attn_implementation(attention)
    expected = turn(model, DynamicCache(config=model.config), IDS, MASK)
    cache = KVCache(model)
    read(model, cache, 0, 9)
    cache.seal()
    read(model, cache, 9, 14)
    cache.seal()
    twin = copy.deepcopy(cache)
    for mine, theirs in zip(cache.kv_layers, twin.kv_layers, strict=True):
        pairs = zip(mine.segments.sealed, theirs.segments.sealed, strict=True)
        assert all(a.rows.keys.data_ptr() == b.rows.keys.data_ptr() for a, b in pairs)
    held = [part.keys.clone() for part in twin.kv_layers[0].segments.parts]
    assert torch.equal(turn(model, cache, IDS, MASK), expected)
    for before, part in zip(held, twin.kv_layers[0].segments.parts, strict=True):
        assert torch.equal(before, part.keys), "one continuation wrote into the rows of another"
    assert torch.equal(turn(model, twin, IDS, MASK), expected)


def test_rollback_into_a_sealed_segment_leaves_the_copies_alone() -> None:
    model = llama()
    expected = turn(model, DynamicCache(config=model.config), IDS, MASK)
    cache = KVCache(model)
    read(model, cache, 0, 12)
    cache.seal()
    twin = copy.deepcopy(cache)
    read(model, cache, 12, 16)
    cache.crop(-9)
    assert (cache.get_seq_length(), cache.kept_length(0)) == (7, 7)
    assert twin.kept_length(0) == 12
    read(model, cache, 7, 12)
    assert torch.equal(turn(model, cache, IDS, MASK), expected)
    assert torch.equal(turn(model, twin, IDS, MASK), expected)


def test_batch_operations_leave_the_copies_alone() -> None:
    model = llama()
    cache = KVCache(model)
    read(model, cache, 0, 12)
    cache.seal()
    twin = copy.deepcopy(cache)
    keys = twin.kv_layers[0].segments.rows.keys.clone()
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(4)
    assert cache.kv_layers[0].segments.rows.keys.shape[0] == 4
    assert torch.equal(cache.kv_layers[0].segments.rows.keys[3], keys[2])
    assert torch.equal(twin.kv_layers[0].segments.rows.keys, keys)


def test_a_cache_that_drops_cannot_be_sealed() -> None:
    cache = SnapKVCache(llama(), 12, window_size=4)
    with pytest.raises(ValueError, match="drops tokens"):
        cache.seal()
