"""Point 7: every `Cache` operation works, or refuses with nothing lost."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_kvcache import KVCache, SnapKVCache

from .common import (
    CACHE,
    CACHES,
    EVICTING,
    KEEPING,
    assert_close,
    batch,
    dynamic,
    feed,
    generate,
    model_of,
    stock_of,
    tight,
)

CASES = ["llama", "gemma3/all", "gpt_oss/all"]
over_caches = pytest.mark.parametrize("label", CACHES)
over_cases = pytest.mark.parametrize("case", CASES)


def state(cache):
    """Positions and rows of every layer, in order of position, as one comparable list."""
    found = []
    for layer in cache.kv_layers:
        rows = layer.segments.rows
        keys = rows.keys
        order = rows.positions.expand(-1, keys.shape[1], -1).argsort(dim=-1, stable=True)
        wide = order.unsqueeze(-1).expand(*order.shape, keys.shape[-1])
        found += [layer.kept_positions(), keys.gather(2, wide), layer.get_seq_length()]
        if rows.scores is not None:
            found.append(rows.scores.gather(2, order))
    return found


def assert_same_state(a, b, exact=True):
    for x, y in zip(state(a), state(b), strict=True):
        if not isinstance(x, torch.Tensor):
            assert x == y
        elif exact or not x.is_floating_point():
            assert torch.equal(x, y)
        else:
            assert_close(x, y)


def filled(label, case, rows=3, blocks=(18, 1, 1), more=12):
    model = model_of(case)
    ids, mask = batch(rows, more=more)
    cache = tight(label, model, case)
    feed(model, cache, ids, mask, list(blocks))
    return model, cache, ids, mask, sum(blocks)


@over_cases
@over_caches
def test_batch_operations_move_whole_rows(label, case):
    model, cache, ids, mask, seen = filled(label, case)
    picks = {
        "reorder_cache": torch.tensor([2, 0, 0]),
        "batch_select_indices": torch.tensor([2, 1]),
        "batch_repeat_interleave": torch.tensor([0, 0, 1, 1, 2, 2]),
    }
    rest = [1, 4, 1]
    expected = feed(model, copy.deepcopy(cache), ids, mask, rest, start=seen)
    for name, index in picks.items():
        other = copy.deepcopy(cache)
        getattr(other, name)(2 if name == "batch_repeat_interleave" else index)
        assert_close(feed(model, other, ids[index], mask[index], rest, start=seen), expected[index])


@over_cases
@over_caches
def test_reset_then_another_prompt(label, case):
    model, cache, *_ = filled(label, case)
    cache.activate_past_recording()
    cache.reset()
    assert cache.get_seq_length() == 0 and sum(layer.nbytes for layer in cache.kv_layers) == 0
    ids, _ = batch(2, more=4)
    ids = ids.flip(1)
    ours = feed(model, cache, ids, blocks=[19, 1, 1, 1])
    fresh = tight(label, model, case)
    assert torch.equal(ours, feed(model, fresh, ids, blocks=[19, 1, 1, 1]))
    assert_same_state(cache, fresh)


@over_cases
@over_caches
def test_deepcopy_is_independent(label, case):
    model, cache, ids, mask, seen = filled(label, case)
    twin = copy.deepcopy(cache)
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in state(cache)]
    expected = feed(model, twin, ids, mask, [1, 3, 1], start=seen)
    for x, y in zip(state(cache), before, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert torch.equal(feed(model, cache, ids, mask, [1, 3, 1], start=seen), expected)
    assert bool(cache) and bool(KVCache(model))


@over_cases
@over_caches
def test_deepcopy_in_the_middle_of_recording(label, case):
    model, cache, ids, mask, seen = filled(label, case, rows=1)
    cache.activate_past_recording()
    feed(model, cache, ids, mask, [4], start=seen)
    twin = copy.deepcopy(cache)
    for each in (cache, twin):
        each.crop(-2)
    assert_same_state(cache, twin)
    rest = [feed(model, each, ids, mask, [1, 2], start=seen + 2) for each in (cache, twin)]
    if label == "paged":
        assert_close(*rest)  # the twin's new blocks lie elsewhere, so sums are taken in another order
    else:
        assert torch.equal(*rest)


@over_caches
def test_deepcopy_after_a_forward_with_grad(label):
    model = model_of("llama")
    ids, mask = batch(1, more=2)
    cache = tight(label, model)
    model(input_ids=ids[:, :18], use_cache=True, **{CACHE: cache})
    twin = copy.deepcopy(cache)
    assert_same_state(cache, twin)
    assert torch.equal(*(feed(model, each, ids, mask, [1, 1], start=18) for each in (cache, twin)))


# ---------------------------------------------------------------------- crop and rollback


@over_cases
@pytest.mark.parametrize("rows", [1, 3])
@over_caches
def test_rollback_in_recording_mode_is_exact(label, rows, case):
    """Junk that is rolled back leaves no trace: same rows, same scores, same logits as if it had never come."""
    model = model_of(case)
    ids, mask = batch(rows, more=30)
    junk = torch.randint(2, 96, ids.shape)
    dirty, clean = tight(label, model, case), tight(label, model, case)
    for cache in (dirty, clean):
        cache.activate_past_recording()
    start = 0
    for good, bad in ((18, 2), (1, 4), (3, 2), (2, 0), (1, 0), (1, 1), (4, 1), (1, 3)):
        stop = start + good
        wrong = torch.cat([ids[:, :stop], junk[:, stop : stop + bad]], dim=1)
        ours = feed(model, dirty, wrong, mask[:, : stop + bad], start=start, whole=True)
        expected = feed(model, clean, ids[:, :stop], mask[:, :stop], start=start, whole=True)
        assert_close(ours[:, :good][mask[:, start:stop].bool()], expected[mask[:, start:stop].bool()])
        dirty.crop(-bad)
        clean.crop(0)
        assert_same_state(dirty, clean, exact=False)
        start = stop


def blocks_of(model, cache, ids, **mode):
    """Tokens of a drafted run, and how many tokens of each verified block were accepted."""
    seen, crop = [], cache.crop

    def spy(n):
        crop(n)
        seen.append(cache.get_seq_length())

    cache.crop = spy
    tokens = generate(model, cache, ids, max_new_tokens=16, **mode)
    return tokens, [b - a for a, b in zip([0, *seen], seen, strict=False)]


@pytest.mark.parametrize("case", ["llama", "gpt_oss/all"])
@pytest.mark.parametrize("label", EVICTING)
@pytest.mark.parametrize("mode", ["lookup", "assistant"])
def test_drafts_leave_no_trace(mode, label, case):
    """Drafted decoding equals the cache's own run over the accepted blocks, with no draft ever seen.

    It need not equal one-token decoding: a block is attended in one step, before the policy drops, so later tokens of
    a block still see rows that one-token decoding would have dropped by then.
    """
    model = model_of(case)
    ids, _ = batch(1)
    ids = torch.cat([ids[:, :9], ids[:, :9], ids[:, :4]], dim=1)
    kwargs = dict(prompt_lookup_num_tokens=4) if mode == "lookup" else dict(assistant_model=stock_of("qwen2"))
    drafted = tight(label, model, case)
    tokens, accepted = blocks_of(model, drafted, ids, **kwargs)
    assert len(accepted) > 3
    replay = tight(label, model, case)
    replay.activate_past_recording()
    start = 0
    for size in accepted:
        logits = feed(model, replay, tokens[:, : start + size], start=start)
        start += size
        replay.crop(0)
        assert int(logits[0, -1].argmax()) == int(tokens[0, start])
    assert_same_state(drafted, replay, exact=False)


def test_a_draft_of_one_token_equals_plain_decoding():
    """Where every block is one token, drafted decoding is the plain run, evictions included."""
    model = model_of("llama")
    ids, mask = batch(1, more=8)
    for label in EVICTING:
        plain, recorded = tight(label, model), tight(label, model)
        feed(model, recorded, ids[:, :18])
        recorded.activate_past_recording()
        ours = []
        for stop in range(19, 27):
            ours.append(feed(model, recorded, ids[:, :stop], start=stop - 1))
            recorded.crop(0)
        assert_close(torch.cat(ours, 1), feed(model, plain, ids, mask, [18] + [1] * 8)[:, 1:])
        assert_same_state(plain, recorded, exact=False)


@over_cases
@pytest.mark.parametrize("rows", [1, 3])
def test_crop_of_a_complete_cache(rows, case):
    model, stock = model_of(case), stock_of(case)
    ids, mask = batch(rows, more=8)
    cache = tight("kv", model, case)
    if case != "llama":
        cache.activate_past_recording()
    feed(model, cache, ids, mask, [18, 4])
    cache.crop(-4)
    assert cache.get_seq_length() == 18
    ours = feed(model, cache, ids, mask, [2, 1], start=18)
    expected = feed(stock, dynamic(stock), ids, mask, [18, 2, 1])[:, 1:]
    assert_close(ours, expected)


@over_cases
@pytest.mark.parametrize("label", EVICTING)
def test_crop_refuses_where_it_cannot_be_exact(label, case):
    model, cache, ids, mask, seen = filled(
        label, case, blocks=(18, 1, 1, 1, 1) if label == "snapkv_decode" else (18, 1, 1)
    )
    before = copy.deepcopy(cache)
    if label in ("snapkv", "snapkv_pyramid", "snapkv_maxpool", "snapkv_adaptive"):
        cache.crop(-2)  # generated tokens only ever came after the drop
        assert cache.get_seq_length() == 18
        with pytest.raises(ValueError, match="activate_past_recording"):
            cache.crop(-1)
        return
    with pytest.raises((ValueError, RuntimeError), match="activate_past_recording"):
        cache.crop(-2)
    # Nothing is lost: it goes on as if it had not been asked.
    assert_same_state(cache, before)
    assert torch.equal(*(feed(model, each, ids, mask, [1], start=seen) for each in (cache, before)))


def test_crop_refuses_for_all_layers_or_for_none():
    """Layers of a pyramid drop at different lengths: the one that cannot roll back speaks before another has."""
    model = model_of("llama")
    ids, mask = batch(1, more=4)
    cache = tight("snapkv_pyramid", model)  # layer 0 holds 14 rows, layer 1 holds 6
    feed(model, cache, ids[:, :12], mask[:, :12])
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-2)
    assert_same_state(cache, before)
    cache = tight("window", model_of("gemma3"), window_length=3)  # layers 0 and 2 are transformers' own
    feed(model_of("gemma3"), cache, ids, mask, [7])
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-2)
    assert {layer.get_seq_length() for layer in cache.layers} == {7}


@over_caches
def test_rollback_of_more_than_the_last_step_is_refused(label):
    model, cache, ids, mask, seen = filled(label, "llama", rows=1)
    cache.activate_past_recording()
    feed(model, cache, ids, mask, [1, 2], start=seen)
    if label in KEEPING:
        cache.crop(-3)
        assert cache.get_seq_length() == seen
        return
    with pytest.raises(ValueError, match="roll back"):
        cache.crop(-20)
    cache.crop(-1)
    assert cache.get_seq_length() == seen + 2


def test_mla_refuses_drafts_before_any_token():
    model = model_of("deepseek_v3")
    ids, _ = batch(1)
    with pytest.raises(NotImplementedError, match="prompt lookup"):
        generate(model, tight("h2o", model), ids, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("label", EVICTING)
def test_a_plain_turn_after_a_drafted_one(label):
    """Recording stays on after drafted decoding; a later plain turn still treats its prompt as one."""
    model = model_of("llama")
    ids, _ = batch(1, more=20)
    cache = tight(label, model)
    tokens = generate(model, cache, ids[:, :18], prompt_lookup_num_tokens=3, max_new_tokens=6)
    turn = torch.cat([tokens, ids[:, 18:]], dim=1)
    generate(model, cache, turn, max_new_tokens=2)
    bound = {"window": 8, "snapkv_pyramid": 14, "h2o": 8, "h2o_ratio": 20}.get(label, 10)
    # One step may be held back, and SnapKV adds generated tokens.
    assert cache.kept_length(0) <= bound + 4


def test_beams_with_eviction_follow_their_own_history():
    """Each beam equals a replay of its own tokens: rows, positions and scores are reordered together."""
    model = model_of("llama")
    ids, _ = batch(1)
    for label in EVICTING:
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            length_penalty=0.0,
            **{CACHE: tight(label, model)},
        )
        replay = feed(model, tight(label, model), out.sequences, blocks=[18] + [1] * 8)[:, :-1].log_softmax(-1)
        total = replay.gather(-1, out.sequences[:, 18:, None]).sum((1, 2))
        assert float((total - out.sequences_scores).abs().max()) < 1e-3, label


def test_snapkv_with_a_prompt_no_longer_than_its_window():
    model, stock = model_of("llama"), stock_of("llama")
    ids, _ = batch(1)
    cache = SnapKVCache(model, max_capacity_prompt=16, window_size=12)
    ours = generate(model, cache, ids[:, :10], max_new_tokens=5)
    assert torch.equal(ours, generate(stock, dynamic(stock), ids[:, :10], max_new_tokens=5))
    assert cache.kept_length() == 14
