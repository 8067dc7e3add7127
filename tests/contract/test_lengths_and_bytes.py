"""Points 1, 5 and 6: seen and kept, KV heads, and bytes that are really there."""

from __future__ import annotations

import types

import pytest
import torch

from hf_kvcache import HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache
from hf_kvcache.rope import KeyRotation

from .common import CACHES, EVICTING, KEEPING, MODELS, batch, feed, model_of, roomy, stock_of, tight

# One latent for all heads.
HEADS = {"deepseek_v3": 1, "deepseek_v3/absorb": 1, "converted": 1, "converted/absorb": 1}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("label", CACHES)
def test_seen_and_kept(label, case):
    model = model_of(case)
    ids, mask = batch(3, more=10)
    cache = tight(label, model, case)
    assert cache.get_seq_length() == 0 and cache.kept_length(0) in (0, None)
    feed(model, cache, ids, mask, [18, 1, 1, 1, 1])
    heads = HEADS.get(case, 2)
    for index, layer in enumerate(cache.layers):
        assert layer.get_seq_length() == cache.get_seq_length(index) == 22
        if layer not in cache.kv_layers:
            continue
        kept = cache.kept_length(index)
        positions = cache.kept_positions(index)
        assert positions.shape == (3, heads, kept)
        assert int(positions.max()) == 21
        assert not ((positions >= 0) & (positions < torch.tensor([0, 6, 12])[:, None, None])).any(), "padding has none"
        assert (positions.diff(dim=-1) >= 0).all(), "ascending"
        counts = (positions >= 0).sum(-1)
        distinct = [len({p for p in head.tolist() if p >= 0}) for row in positions for head in row]
        assert counts.flatten().tolist() == distinct, "no token is held twice"
        if label in KEEPING:
            assert kept >= min(22, layer.sliding_window or 22)
        else:
            assert kept < 22
            assert layer.get_mask_sizes(3) == (kept + 3, 22 - kept)
    # The next turn starts at `seen`, whatever is held.
    feed(model, cache, ids, mask, [6], start=22)
    assert cache.get_seq_length() == 28
    assert all(int(cache.kept_positions(i).max()) == 27 for i, x in enumerate(cache.layers) if x in cache.kv_layers)


@pytest.mark.parametrize("label", EVICTING)
def test_budgets_hold_at_every_step(label):
    model = model_of("llama")
    ids, _ = batch(1, more=30)
    cache = tight(label, model)
    feed(model, cache, ids[:, :18])
    unbounded = dict.fromkeys(("snapkv", "snapkv_pyramid", "snapkv_maxpool", "snapkv_adaptive"))
    bound = {"window": 8, "snapkv_decode": 12} | unbounded
    for stop in range(19, 48):
        feed(model, cache, ids[:, :stop], start=stop - 1)
        limit = bound.get(label, 8)
        # Without `decode_budget`, SnapKV bounds the prompt and documents that generated tokens are added to it.
        start = {"snapkv_pyramid": 14, "snapkv_adaptive": 14}.get(label, 10)
        assert cache.kept_length(0) <= (limit if limit is not None else start + stop - 18)


def test_heads_are_stored_once_and_select_for_themselves():
    model = model_of("llama")
    ids, _ = batch(3)
    for label in ("snapkv", "h2o"):
        cache = tight(label, model)
        feed(model, cache, ids)
        for layer in range(2):
            assert cache.layers[layer].keys.shape[1] == 2  # of 4 query heads
            positions = cache.kept_positions(layer)
            assert any(not torch.equal(positions[row, 0], positions[row, 1]) for row in range(3))


# ---------------------------------------------------------------------- bytes


def storages(root, model):
    """Every tensor storage reachable from `root` that is not the model's: {address: bytes}."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found, visited, stack = {}, set(), [root]
    while stack:
        item = stack.pop()
        # Frequencies of a rotation are the model's own, or chosen among them by a converted layer.
        if id(item) in visited or isinstance(item, (type, types.ModuleType, torch.nn.Module, torch.dtype, KeyRotation)):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            # Scalars are constants of transformers' own layers.
            if storage.data_ptr() not in own and item.ndim > 0:
                found[storage.data_ptr()] = storage.nbytes()
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple, set)):
            stack += item
        if isinstance(item, types.FunctionType):
            stack += [cell.cell_contents for cell in item.__closure__ or ()]
        stack += getattr(item, "__dict__", {}).values()
        stack += [getattr(item, name) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name)]
    return found


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("label", [label for label in CACHES if label != "paged"])
def test_nbytes_is_what_is_held(label, case, rows):
    """A pool holds blocks of other caches and free ones too: `test_paging.py` counts them."""
    model = model_of(case)
    ids, mask = batch(rows, more=8)
    cache = tight(label, model, case)
    assert cache.nbytes == 0
    for start, size in ((0, 18), (18, 1), (19, 1), (20, 4), (24, 1)):
        feed(model, cache, ids[:, : start + size], mask[:, : start + size], start=start)
        assert cache.nbytes == sum(storages(cache, model).values())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("label", CACHES)
def test_the_formula_of_bytes(label, case, rows):
    model = model_of(case)
    ids, _ = batch(rows)
    for make in (roomy, tight):
        cache = make(label, model, case)
        expected = cache.expected_bytes(model.config, rows, 18)
        feed(model, cache, ids)
        held = sum(layer.nbytes for layer in cache.kv_layers)
        if label == "snapkv_adaptive" and rows > 1:
            assert expected <= held <= 2 * expected  # a head is as long as its longest batch row
        else:
            assert held == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_knows_the_dtype(dtype):
    model = model_of("llama", "sdpa", "bf16" if dtype == torch.bfloat16 else "fp32")
    ids, _ = batch(1)
    cache = KVCache(model)
    feed(model, cache, ids)
    assert cache.expected_bytes(model.config, 1, 18, dtype=dtype) == cache.nbytes
    assert cache.expected_bytes(stock_of("llama").config, 1, 18, dtype=dtype) == cache.nbytes


LONG = {
    "kv": lambda model: KVCache(model),
    "window": lambda model: SlidingWindowCache(model, 256),
    "snapkv": lambda model: SnapKVCache(model, 256, decode_budget=64),
    "h2o": lambda model: HeavyHitterCache(model, 128, 128),
}


@pytest.mark.parametrize("label", LONG)
def test_slack_and_peak_over_a_long_decode(label):
    """Slack stays below a quarter beyond the first 1k tokens, and a bounded cache never grows past its bound."""
    model = model_of("llama")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 96, (1, 1300), generator=generator)
    cache = LONG[label](model)
    feed(model, cache, ids[:, :1100])
    row = 2 * 2 * 8 * 4 + (4 if label in ("kv", "window") else 2 * 4) + (2 * 4 if label == "h2o" else 0)
    for stop in range(1101, 1301):
        feed(model, cache, ids[:, :stop], start=stop - 1)
        held = cache.kept_length(0)
        assert cache.nbytes <= 1.25 * 2 * row * max(held, 256)
        assert held == stop if label == "kv" else held <= 256 + (64 if label == "snapkv" else 4)
