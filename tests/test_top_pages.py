"""Top pages: only the pages that can matter are read, each query chooses for itself, and padding is never chosen."""

from __future__ import annotations

import pytest
import torch
from contract.common import MODELS, feed, generate, model_of
from test_offload import IDS, MASK, SMALL, deep, one_thread, tier  # noqa: F401 (fixtures)

from hf_kvcache import CPUOffloadedCache, KVCache
from hf_kvcache.offload.attend import page_scores
from hf_kvcache.segments import OffloadedStore
from hf_kvcache.segments.offloaded import page_bounds

pytestmark = pytest.mark.usefixtures("one_thread")
ATTEND = pytest.mark.parametrize("attend", ["fetch", "compute"])
ATTENTION = pytest.mark.parametrize("attention", ["sdpa", "eager"])


@ATTENTION
@ATTEND
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("rows", [1, 3])
def test_all_pages_equal_resident_rows(deep, rows, where, attend, attention, tmp_path, monkeypatch):  # noqa: F811
    """Gathered page by page as well as all at once."""
    deep.set_attn_implementation(attention)
    steps = [60, *[1] * 25]
    expected = feed(deep, KVCache(deep), IDS[:rows], MASK[:rows], steps)
    for by_page in (False, True):
        cache = CPUOffloadedCache(deep, **SMALL, attend=attend, top_pages=1.0, **tier(where, tmp_path))
        if by_page:
            monkeypatch.setattr(OffloadedStore, "selects", lambda store, new: store.low is not None)
        ours = feed(deep, cache, IDS[:rows], MASK[:rows], steps)
        if attend == "fetch" or attention == "eager":
            assert torch.equal(ours, expected)
        else:
            assert float((ours - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(
    "case", [case for case in MODELS if case != "mistral/all" and not case.startswith(("deepseek_v3", "converted"))]
)
def test_all_pages_with_everything_that_models_add(case, monkeypatch):
    """Soft caps, attention sinks, sliding layers beside full ones, by page."""
    model = model_of(case)
    ids, mask = IDS[:, :60], MASK[:, :60]
    steps = [30, *[1] * 12]
    expected = feed(model, KVCache(model), ids, mask, steps)
    monkeypatch.setattr(OffloadedStore, "selects", lambda store, new: store.low is not None)
    for attend in ("fetch", "compute"):
        ours = feed(model, CPUOffloadedCache(model, **SMALL, attend=attend, top_pages=1.0), ids, mask, steps)
        assert float((ours - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@ATTENTION
@ATTEND
@pytest.mark.parametrize("top", [0.3, 4])
def test_drafts_choose_what_single_tokens_choose(deep, top, attend, attention):  # noqa: F811
    deep.set_attn_implementation(attention)
    out = []
    for steps in ([80, *[1] * 20], [80, 3, 5, 7, 4, 1]):
        cache = CPUOffloadedCache(deep, **SMALL, attend=attend, top_pages=top)
        out.append(feed(deep, cache, IDS, MASK, steps, whole=True)[:, -20:])
    assert float((out[0] - out[1]).abs().max()) <= 2e-5
    full = feed(deep, KVCache(deep), IDS, MASK, [80, *[1] * 20], whole=True)[:, -20:]
    assert float((out[0] - full).abs().max()) > 1e-2, "something was left out"


def test_drafted_decoding_equals_plain(deep):  # noqa: F811
    deep.set_attn_implementation("sdpa")
    ids = torch.cat([IDS[:1, :60], IDS[:1, :60]], dim=1)
    out = []
    for more in ({}, dict(prompt_lookup_num_tokens=4)):
        cache = CPUOffloadedCache(deep, **SMALL, top_pages=0.3)
        out.append(generate(deep, cache, ids, max_new_tokens=50, **more))
    assert torch.equal(*out)


def test_a_row_padded_by_whole_pages_equals_its_solo_run(deep):  # noqa: F811
    deep.set_attn_implementation("sdpa")
    ids, mask = IDS[:2].clone(), torch.ones_like(IDS[:2])
    mask[1, :16] = 0
    ids[0], ids[1, :16] = IDS[0].clamp(min=2), 0
    padded = CPUOffloadedCache(deep, **SMALL, top_pages=5)
    both = feed(deep, padded, ids, mask, [80, *[1] * 12])
    alone = feed(deep, CPUOffloadedCache(deep, **SMALL, top_pages=5), ids[1:, 16:], None, [64, *[1] * 12])
    assert float((both[1:] - alone).abs().max()) <= 2e-5


def test_bounds_and_choice_by_hand():
    torch.manual_seed(0)
    keys = torch.randn(2, 2, 24, 4)
    positions = torch.arange(24).expand(2, 1, 24).clone()
    positions[1, 0, :6] = -1
    low, high = page_bounds(keys, positions, 4)
    assert torch.equal(low[0, 1, 2], keys[0, 1, 8:12].amin(0)) and torch.equal(high[0, 1, 2], keys[0, 1, 8:12].amax(0))
    assert torch.equal(low[1, 0, 1], keys[1, 0, 6:8].amin(0)), "padding does not count"
    query = torch.randn(2, 4, 1, 4)
    scores = page_scores(query, low, high, 0.5)
    assert scores.shape == (2, 2, 6)
    assert torch.isneginf(scores[1, :, 0]).all(), "a page of padding is never chosen"
    assert torch.isposinf(scores[0, :, 0]).all() and torch.isposinf(scores[1, :, 1]).all(), "the first page always is"
    q = query.view(2, 2, 2, 4)
    for row, head, page in ((0, 1, 3), (1, 0, 2)):
        votes = 0.0
        for member in range(2):
            estimates = []
            for p in range(6):
                real = positions[row, 0, p * 4 : p * 4 + 4] >= 0
                if real.any():
                    middle, radius = ((high + s * low)[row, head, p] / 2 for s in (1, -1))
                    one = q[row, head, member] * 0.5
                    estimates.append(float((one * middle).sum() + 0.5 * (one.abs() * radius).sum()))
                else:
                    estimates.append(float("-inf"))
            votes += float(torch.softmax(torch.tensor(estimates), 0)[page])
        assert abs(float(scores[row, head, page]) - votes) < 1e-5


@pytest.mark.parametrize("where", ["host", "disk"])
def test_only_chosen_pages_are_read(deep, where, tmp_path, monkeypatch):  # noqa: F811
    """Other pages may hold anything."""
    deep.set_attn_implementation("sdpa")
    cache = CPUOffloadedCache(deep, **SMALL, attend="fetch", top_pages=3)
    feed(deep, cache, IDS[:1], None, [80])
    store, picked = cache.kv_layers[0].segments, []
    gather = OffloadedStore.gather

    def watched(self, pages, device):
        picked.append((self, pages))
        return gather(self, pages, device)

    monkeypatch.setattr(OffloadedStore, "gather", watched)
    first = feed(deep, cache, IDS[:1], None, [1], start=80)
    assert all(pages.shape == (1, 2, 3) for _, pages in picked) and len(picked) == len(cache.kv_layers)
    cache.crop(-1)
    for this, pages in picked:
        for head in range(2):
            others = [p for p in range(store.away_pages) if p not in pages[0, head].tolist()]
            for run in this.runs:
                for page in others:
                    run.keys[0, head, page * 4 : page * 4 + 4] = float("nan")
                    run.values[0, head, page * 4 : page * 4 + 4] = float("nan")
    assert torch.equal(feed(deep, cache, IDS[:1], None, [1], start=80), first)
    assert cache.offloader.nbytes == 0  # nothing was staged whole


@pytest.mark.parametrize("name", ["crop", "reorder", "copy"])
def test_operations_carry_the_bounds_along(deep, name):  # noqa: F811
    import copy

    deep.set_attn_implementation("sdpa")
    cache = CPUOffloadedCache(deep, **SMALL, attend="fetch", top_pages=0.4)
    feed(deep, cache, IDS, MASK, [80])
    if name == "crop":
        cache.crop(-30)
    elif name == "reorder":
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    else:
        cache = copy.deepcopy(cache)
    for layer in cache.kv_layers:
        store = layer.segments
        n = store.away_rows
        low, high = page_bounds(store.owned("keys")[:, :, :n], store.positions[:, :, :n], 4)
        assert torch.equal(store.low, low) and torch.equal(store.high, high)
    if name == "crop":  # to a length at which more has left than would have
        fresh = CPUOffloadedCache(deep, **SMALL, attend="fetch", top_pages=0.4)
        feed(deep, fresh, IDS, MASK, [50])
        ours, theirs = (feed(deep, each, IDS, MASK, [1] * 20, start=50) for each in (cache, fresh))
        assert float((ours - theirs).abs().max()) <= 2e-5  # their prompts were of different lengths
