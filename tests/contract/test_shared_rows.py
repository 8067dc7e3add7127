"""One batch row of sealed rows that stands for every row of a batch: equal to a copy for each, and held once."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_kvcache import KVCache, load
from hf_kvcache.segments import Chain, PackedChain, PackedStore

from .common import CACHE, VOCABULARY, generate, model_of
from .test_codecs import codec, double

PREFIX = 90
ROWS = 3
# Real tokens that follow the prefix in each row; shorter rows have their padding between.
FOLLOWING = (40, 25, 33)
# None is full precision; blocks of 32 and 8 sinks, 64 tokens in a group, one scale per token.
NAMES = (None, "kivi4", "kivi2-mse", "kivi3-8", "rotated3", "rotated2-lloyd-max", "float8")
NEAR = 5e-5  # logits are of float32, and merged
over_caches = pytest.mark.parametrize("name", NAMES)
over_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def make(model, name):
    return KVCache(model) if name is None else KVCache(model, codec=codec(name))


def text(padded=False):
    generator = torch.Generator().manual_seed(17)
    ids = torch.randint(2, VOCABULARY, (ROWS, PREFIX + max(FOLLOWING)), generator=generator)
    ids[:, :PREFIX] = ids[:1, :PREFIX]
    mask = torch.ones_like(ids)
    for row, count in enumerate(FOLLOWING):
        if padded:
            mask[row, PREFIX : PREFIX + max(FOLLOWING) - count] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def feed(model, cache, ids, mask, start, blocks):
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = []
    for size in blocks:
        stop = start + size
        logits = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            **{CACHE: cache},
        ).logits
        out.append(logits.masked_fill(mask[:, start:stop, None] == 0, 0.0))
        start = stop
    return torch.cat(out, dim=1)


def both(model, name, ids, mask):
    """A cache whose prefix is shared by all rows, and one that holds a copy of it for each."""
    caches = []
    for share in (True, False):
        cache = make(model, name)
        feed(model, cache, ids[:1], mask[:1], 0, [60, PREFIX - 60])
        if share:
            cache.seal()
            for layer in cache.kv_layers:
                layer.free_batch()
        else:
            cache.batch_repeat_interleave(ROWS)
        caches.append(cache)
    return caches


def storages(cache):
    """Address and bytes of every buffer of every layer."""
    found = {}

    def visit(value):
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif type(value).__module__.startswith("hf_kvcache.segments"):
            for name, item in vars(value).items():
                if name not in ("_codec", "_turns"):
                    visit(item)

    for layer in cache.kv_layers:
        visit(layer.segments)
        visit(layer.padding)
    return {pointer: size for pointer, size in found.items() if size}


def sealed_rows(layer):
    store = layer.segments
    if isinstance(store, Chain):
        return [segment.rows.keys for segment in store.sealed]
    return [part.keys.packed.codes for part in store.sealed if part.keys is not None]


@over_attention
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@over_caches
def test_shared_rows_equal_copies(name, padded, attention) -> None:
    model = double("llama", attention)
    ids, mask = text(padded)
    shared, copied = both(model, name, ids, mask)
    blocks = [20, *[1] * 8, 5, *[1] * 7]
    ours = feed(model, shared, ids, mask, PREFIX, blocks)
    theirs = feed(model, copied, ids, mask, PREFIX, blocks)
    assert float((ours - theirs).abs().max()) < NEAR
    for mine, other in zip(shared.kv_layers, copied.kv_layers, strict=True):
        assert all(tensor.shape[0] == 1 for tensor in sealed_rows(mine)) and sealed_rows(mine)
        assert torch.equal(mine.kept_positions(), other.kept_positions())
        assert torch.allclose(mine.keys, other.keys, atol=NEAR) and torch.allclose(mine.values, other.values, atol=NEAR)
        if isinstance(other.segments, PackedStore) and other.segments.has_packed and not padded:
            whole = mine.segments.flat()
            assert whole.used == other.segments.used and whole.fronts == other.segments.fronts
            for role in ("keys", "values"):
                a, b = getattr(whole, role), getattr(other.segments, role)
                assert torch.equal(a.codes(whole.slots), b.codes(whole.slots))
    assert name is not None or shared.nbytes < copied.nbytes  # of a codec, there is more slack here than rows
    assert shared.nbytes == sum(storages(shared).values())


@over_caches
def test_beams_and_samples_over_shared_rows(name) -> None:
    model = model_of("llama")
    ids, mask = text()
    for kwargs in (dict(num_beams=4), dict(num_beams=4, num_return_sequences=2), dict(do_sample=True, top_k=20)):
        tokens = []
        for cache in both(double("llama") if name else model, name, ids, mask):
            expand = kwargs.get("num_beams", 1)
            if cache.kv_layers[0].is_initialized and expand > 1:
                cache.batch_repeat_interleave(expand)
            used = double("llama") if name else model
            tokens.append(generate(used, cache, ids, mask, max_new_tokens=12, **kwargs))
        assert torch.equal(*tokens)


@over_caches
def test_batch_operations_leave_shared_rows_as_they_are(name) -> None:
    model = double("llama")
    ids, mask = text()
    shared, copied = both(model, name, ids, mask)
    for cache in (shared, copied):
        feed(model, cache, ids, mask, PREFIX, [30])
        before = [tensor.data_ptr() for layer in shared.kv_layers for tensor in sealed_rows(layer)]
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(2)
    assert before == [tensor.data_ptr() for layer in shared.kv_layers for tensor in sealed_rows(layer)]
    rows = torch.tensor([2, 2, 0, 0])
    ours, theirs = (feed(model, c, ids[rows], mask[rows], PREFIX + 30, [1, 4, 1]) for c in (shared, copied))
    assert float((ours - theirs).abs().max()) < NEAR


@over_caches
@pytest.mark.parametrize("back", [5, 30, 60, 100, 119])
def test_rollback_into_shared_rows(name, back) -> None:
    model = double("llama")
    ids, mask = text()
    shared, copied = both(model, name, ids, mask)
    twin = copy.deepcopy(shared)
    expected = feed(model, copy.deepcopy(shared), ids, mask, PREFIX, [30, 1])
    for cache in (shared, copied):
        feed(model, cache, ids, mask, PREFIX, [20, *[1] * 10])
        cache.crop(-back)
        assert cache.get_seq_length() == PREFIX + 30 - back
    start = PREFIX + 30 - back
    blocks = [back, 1, 1]
    ours, theirs = (feed(model, cache, ids, mask, start, blocks) for cache in (shared, copied))
    assert float((ours - theirs).abs().max()) < NEAR
    assert torch.equal(feed(model, twin, ids, mask, PREFIX, [30, 1]), expected), "a copy was changed"


@over_caches
def test_a_second_sealing_and_a_copy(name) -> None:
    model = double("llama")
    ids, mask = text()
    cache, plain = make(model, name), make(model, name)
    feed(model, plain, ids[:1], mask[:1], 0, [60, 40])
    feed(model, cache, ids[:1], mask[:1], 0, [60])
    cache.seal()
    feed(model, cache, ids[:1], mask[:1], 60, [40])
    cache.seal()
    twin = copy.deepcopy(cache)
    shared = set(storages(cache)) & set(storages(twin))
    own = sum(layer.segments.tail.nbytes for layer in cache.kv_layers)
    means = sum(
        layer.segments.mean.nbytes for layer in cache.kv_layers if getattr(layer.segments, "mean", None) is not None
    )
    assert sum(storages(cache)[pointer] for pointer in shared) == cache.nbytes - own - means > 0
    if name is not None and cache.kv_layers[0].segments.codec.block == 32:
        assert any(len(layer.segments.sealed) == 2 for layer in cache.kv_layers)
    expected = feed(model, plain, ids[:1], mask[:1], 100, [1] * 20)
    for each in (cache, twin):
        assert float((feed(model, each, ids[:1], mask[:1], 100, [1] * 20) - expected).abs().max()) < NEAR


@over_caches
def test_files_of_shared_rows(name, tmp_path) -> None:
    model = double("llama")
    ids, mask = text()
    shared, _ = both(model, name, ids, mask)
    feed(model, shared, ids, mask, PREFIX, [30])
    path = str(tmp_path / "cache.safetensors")
    shared.save(path)
    loaded = load(path, model)
    assert not any(isinstance(layer.segments, PackedChain) for layer in loaded.kv_layers)
    ours, theirs = (feed(model, cache, ids, mask, PREFIX + 30, [1] * 9) for cache in (shared, loaded))
    assert float((ours - theirs).abs().max()) < NEAR


@over_caches
def test_two_turns_reset_and_drafts(name) -> None:
    model = model_of("llama") if name is None else double("llama")
    ids, mask = text()
    shared, copied = both(model, name, ids, mask)
    first = [generate(model, cache, ids, mask, max_new_tokens=10) for cache in (shared, copied)]
    assert torch.equal(*first)
    history = torch.cat([first[0], ids[:, :20]], dim=1)
    second = [generate(model, cache, history, max_new_tokens=10) for cache in (shared, copied)]
    assert torch.equal(*second)
    fresh = generate(model, make(model, name), ids[:, :50], max_new_tokens=6)
    shared.reset()
    assert torch.equal(generate(model, shared, ids[:, :50], max_new_tokens=6), fresh)
    for more in (dict(prompt_lookup_num_tokens=4), dict(assistant_model=model)):
        one, other = both(model, name, ids, mask)
        other.batch_select_indices(torch.tensor([0]))
        drafted = [generate(model, cache, ids[:1], mask[:1], max_new_tokens=24, **more) for cache in (one, other)]
        assert torch.equal(*drafted)


def test_training_over_shared_rows() -> None:
    model = double("llama")
    ids, mask = text()
    grads = []
    for cache in both(model, None, ids, mask):
        positions = torch.arange(PREFIX, PREFIX + 30)[None]
        logits = model(ids[:, PREFIX : PREFIX + 30], position_ids=positions, **{CACHE: cache}).logits
        logits.square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-4, atol=1e-5), name


def test_another_models_rows_are_refused() -> None:
    model = model_of("llama")
    ids, mask = text()
    shared, _ = both(model, None, ids, mask)
    layer = shared.kv_layers[0]
    with pytest.raises(ValueError, match="another model"):
        layer.update(torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 8))
