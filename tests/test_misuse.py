"""What somebody who had read only the README tried, and what went wrong then."""

from __future__ import annotations

import pytest
import torch
from contract.common import batch, feed, generate, model_of

from hf_kvcache import BlockPool, CPUOffloadedCache, KVCache, PrefixStore, find_sharing


def test_a_store_with_use_cache_false_gives_what_generate_gives() -> None:
    model = model_of("llama")
    ids, mask = batch(2)
    for rows in (slice(0, 1), slice(0, 2)):
        arguments = dict(attention_mask=mask[rows], max_new_tokens=5, do_sample=False, use_cache=False)
        expected = model.generate(input_ids=ids[rows], **arguments)
        with pytest.warns(RuntimeWarning, match="use_cache"):
            ours = PrefixStore(1 << 28).generate(model, ids[rows], **arguments)
        assert torch.equal(ours, expected)


def test_a_store_makes_the_cache_itself() -> None:
    with pytest.raises(ValueError, match="cache_implementation"):
        PrefixStore(1 << 28).generate(model_of("llama"), batch(1)[0], cache_implementation="static")


def test_one_row_is_not_kept_for_others() -> None:
    model = model_of("llama")
    ids = batch(1)[0].repeat(2, 1)
    cache = KVCache(model)
    feed(model, cache, ids[:1])
    store = PrefixStore(1 << 28)
    assert store.put(model, ids, cache) == ids.shape[1]  # the same text twice
    ids[1, 3] = (ids[1, 3] + 1) % 90 + 2
    with pytest.raises(ValueError, match="one batch row"):
        store.put(model, ids, cache)


def test_a_bound_on_files_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="path"):
        PrefixStore(1 << 20, max_disk_bytes=1 << 20)


def test_a_cache_left_half_way_is_not_saved(tmp_path) -> None:
    model = model_of("llama")
    cache = KVCache(model)
    ids = batch(1, more=4)[0]
    feed(model, cache, ids[:, :12])

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids, blocks=[6], start=12)
    finally:
        handle.remove()
    with pytest.raises(ValueError, match="half-way"):
        cache.save(str(tmp_path / "cache.safetensors"))


def test_a_prompt_that_a_pool_has_no_room_for() -> None:
    model = model_of("llama")
    ids = batch(1, more=4)[0]
    cache = KVCache(model, pool=BlockPool(block_size=4, max_bytes=6000))
    with pytest.raises(MemoryError):
        feed(model, cache, ids)
    assert cache.nbytes >= 0
    cache.reset()
    assert torch.equal(feed(model, cache, ids[:, :4]), feed(model, KVCache(model), ids[:, :4]))


def test_a_crop_that_a_layer_of_transformers_cannot_do() -> None:
    model = model_of("gemma3")
    cache = KVCache(model)
    feed(model, cache, batch(1)[0])
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-3)
    assert cache.get_seq_length() == 18


def test_no_rows_at_all() -> None:
    model = model_of("llama")
    for cache in (KVCache(model), CPUOffloadedCache(model, resident_length=4, page=2)):
        generate(model, cache, batch(2)[0])
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))
        assert "seen" in repr(cache)


def test_more_followers_than_layers_cost_nothing() -> None:
    model = model_of("llama")
    before = model.forward
    calls = []
    model.forward = lambda *args, **kwargs: calls.append(1) or before(*args, **kwargs)
    try:
        with pytest.raises(ValueError, match="at most 1"):
            find_sharing(model, [batch(1)[0]], layers_to_share=2)
    finally:
        model.forward = before
    assert not calls
