"""Offload: what has left the device is attended to as if it had stayed, and what it costs is what is said."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
from contract.common import _SIZES, VOCABULARY, dynamic, feed, generate, model_of
from test_storage import gemma3
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcache import CPUOffloadedCache, HeavyHitterCache, KVCache, Offload, SlidingWindowCache, SnapKVCache, load
from hf_kvcache.codecs import KIVI, Rotated
from hf_kvcache.offload.transfer import Staging, faster_mode
from hf_kvcache.policies import SnapKV
from hf_kvcache.segments import OffloadedPackedStore, OffloadedStore
from hf_kvcache.segments.dense import DenseSegment

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 4
GENERATOR = torch.Generator().manual_seed(23)
IDS = torch.randint(2, VOCABULARY, (3, 300), generator=GENERATOR)
MASK = torch.ones_like(IDS)
MASK[1, :5], MASK[2, :13] = 0, 0
IDS = IDS * MASK
STEPS = [40, *[1] * 50]
SMALL = dict(resident_length=6, page=4)


@pytest.fixture(scope="module")
def one_thread():
    """A pool of threads costs more than these models compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def deep(one_thread):
    """More layers than staging buffers."""
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**_SIZES | dict(num_hidden_layers=LAYERS))).eval()


def tier(name, folder):
    """host: memory alone. disk: files alone. both: some pages of each layer in memory."""
    if name == "host":
        return {}
    return dict(disk=folder, host_bytes={"disk": 0, "both": LAYERS * 3 * 2 * 4 * 16 * 4 * 5}[name])


TIERS = ("host", "disk", "both")


def tiers_in_use(cache):
    return {run.tier for layer in cache.kv_layers for run in layer.segments.runs}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", TIERS)
def test_fetched_rows_equal_resident_ones_bit_for_bit(deep, where, rows, attention, tmp_path):
    deep.set_attn_implementation(attention)
    expected = feed(deep, KVCache(deep), IDS[:rows], MASK[:rows], STEPS)
    cache = CPUOffloadedCache(deep, **SMALL, attend="fetch", **tier(where, tmp_path))
    assert torch.equal(feed(deep, cache, IDS[:rows], MASK[:rows], STEPS), expected)
    assert tiers_in_use(cache) == {"host": {"host"}, "disk": {"disk"}, "both": {"host", "disk"}}[where]
    assert cache.kv_layers[0].segments.away_pages == (90 - 6) // 4
    # A second turn of many tokens, and what follows it.
    more = [30, 1, 1, 17, 1]
    resident = KVCache(deep)
    feed(deep, resident, IDS[:rows], MASK[:rows], STEPS)
    expected = feed(deep, resident, IDS[:rows], MASK[:rows], more, start=90)
    assert torch.equal(feed(deep, cache, IDS[:rows], MASK[:rows], more, start=90), expected)


def mirror(resident: KVCache, offloaded: KVCache) -> None:
    """Cut the rows of a resident cache, all on one device, where those of the offloaded one are cut."""
    for mine, theirs in zip(resident.kv_layers, offloaded.kv_layers, strict=True):
        rows, chain, start = mine.segments.rows, mine.segments, 0
        sizes = [keys.shape[2] for keys, _ in theirs.segments.pieces()]
        chain.sealed = []
        for size in [*sizes, theirs.segments.tail.length]:
            part = DenseSegment()
            part.append(rows.map(lambda t, start=start, size=size: t[:, :, start : start + size].clone()))
            chain.sealed.append(part)
            start += size
        chain.tail = chain.sealed.pop()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", TIERS)
def test_rows_attended_where_they_lie_equal_the_same_segments_on_one_device_bit_for_bit(deep, where, rows, tmp_path):
    deep.set_attn_implementation("sdpa")
    ids, mask = IDS[:rows], MASK[:rows]
    cache, twin = CPUOffloadedCache(deep, **SMALL, attend="compute", **tier(where, tmp_path)), KVCache(deep)
    resident = KVCache(deep)
    for start, size in zip(itertools.accumulate([0, *STEPS]), STEPS, strict=False):
        if start:
            mirror(twin, cache)
        ours = feed(deep, cache, ids, mask, [size], start=start)
        assert torch.equal(ours, feed(deep, twin, ids, mask, [size], start=start)), start
        # In one pass the same sums are rounded in another order.
        single = feed(deep, resident, ids, mask, [size], start=start)
        assert float((ours - single).abs().max()) <= 1e-5 * float(single.abs().max())
        assert torch.equal(ours.argmax(-1), single.argmax(-1))
    assert len(list(cache.kv_layers[0].segments.pieces())) > 1 or where == "disk"
    assert cache.offloader.traffic.to_device == 0 and cache.offloader.nbytes == 0


@pytest.mark.parametrize("attend", ["fetch", "compute"])
@pytest.mark.parametrize("where", TIERS)
def test_hybrid_models_offload_full_attention_layers_only(attend, where, tmp_path):
    model = gemma3()
    ids, mask = IDS[:, :70] % 60 + 2, MASK[:, :70]
    ids = ids * mask
    expected = generate(model, dynamic(model), ids, mask, max_new_tokens=40)
    cache = CPUOffloadedCache(model, **SMALL, attend=attend, **tier(where, tmp_path))
    assert torch.equal(generate(model, cache, ids, mask, max_new_tokens=40), expected)
    assert [isinstance(layer.segments, OffloadedStore) for layer in cache.kv_layers] == [True]
    assert len(cache.layers) == 3 and cache.kv_layers[0].segments.is_away


# ---------------------------------------------------------------------- staging


def flat_buffers() -> int:
    """Bytes of all living staging buffers, found without the library's help."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.uint8 and t.ndim == 1]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


@pytest.mark.parametrize("codec", [None, Rotated(4, residual_length=16)], ids=["exact", "packed"])
def test_two_layers_of_staging_at_most(deep, codec, monkeypatch):
    deep.set_attn_implementation("sdpa")
    before, peak, bounds = flat_buffers(), [0], [0]
    fetch = Staging.fetch

    def counted(self, store, follower, traffic):
        slot = fetch(self, store, follower, traffic)
        peak[0] = max(peak[0], flat_buffers() - before)
        bounds[0] = max(bounds[0], store.staged_bytes(store.staged_room(0)))
        return slot

    monkeypatch.setattr(Staging, "fetch", counted)
    cache = CPUOffloadedCache(deep, **SMALL, attend="fetch", codec=codec)
    feed(deep, cache, IDS, MASK, [100, *[1] * 6, 30, *[1] * 6])
    # A buffer has room for a sixteenth more than one layer needs.
    assert 1.5 * bounds[0] < peak[0] <= 2 * bounds[0] * 17 / 16
    assert next(iter(cache.offloader.staging.values())).peak == peak[0] == cache.offloader.nbytes
    if codec is None:
        batch, heads, key_dim, value_dim = cache.kv_layers[0].segments.shape
        layer = batch * heads * (cache.get_seq_length() + 32) * (key_dim + value_dim) * 4
        assert bounds[0] == layer
    cache.reset()
    assert flat_buffers() == before and cache.nbytes == 0


def test_the_next_layer_is_there_before_it_is_asked_for(deep):
    cache = CPUOffloadedCache(deep, **SMALL, attend="fetch")
    feed(deep, cache, IDS, MASK, [40])
    traffic = cache.offloader.traffic
    assert traffic.fetched == 0  # a first prompt is attended where it lies
    feed(deep, cache, IDS, MASK, [1], start=40)
    assert (traffic.fetched, traffic.prefetched) == (LAYERS, LAYERS - 1)
    # Rows that changed after they were prefetched are fetched again.
    store = cache.kv_layers[1].segments
    cache.offloader.fetch(cache.kv_layers[0].segments, store.device)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    keys = store.staged()[0] if not torch.is_grad_enabled() else store.owned("keys")
    with torch.no_grad():
        assert torch.equal(store.staged()[0], store.owned("keys")) and torch.equal(keys, store.owned("keys"))


def test_keys_that_are_handed_out_are_not_staged(deep):
    """Tensors read from outside stay what they are when other layers are read."""
    cache = CPUOffloadedCache(deep, **SMALL, attend="fetch")
    feed(deep, cache, IDS, MASK, [40, 1])
    with torch.no_grad():
        read = [layer.keys for layer in cache.layers]
        again = [layer.keys for layer in cache.layers]
        feed(deep, cache, IDS, MASK, [1], start=41)
    assert all(torch.equal(a, b) for a, b in zip(read, again, strict=True))
    assert len({t.data_ptr() for t in read}) == LAYERS


def test_a_long_step_leaves_no_staging_where_rows_are_attended_where_they_lie(deep):
    cache = CPUOffloadedCache(deep, **SMALL, attend="compute")
    feed(deep, cache, IDS, MASK, [40, 1, 30])
    assert cache.offloader.nbytes > 0
    feed(deep, cache, IDS, MASK, [1], start=71)
    assert cache.offloader.nbytes == 0


def test_pages_are_smaller_where_they_are_chosen_among():
    assert (Offload().page, Offload(top_pages=0.5).page, Offload(page=8, top_pages=0.5).page) == (64, 16, 8)


def test_auto_on_a_machine_without_a_gpu():
    assert faster_mode(torch.device("cpu"), torch.float32) == "compute"


# ---------------------------------------------------------------------- operations


OPERATIONS = {
    "crop": lambda cache: cache.crop(-3),
    "crop into pages": lambda cache: cache.crop(-23),
    "crop to a page": lambda cache: cache.crop(-(cache.get_seq_length() - 16)),
    "crop nearly all": lambda cache: cache.crop(-(cache.get_seq_length() - 2)),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "reorder twice": lambda cache: [cache.reorder_cache(torch.tensor(order)) for order in ([2, 1, 0], [1, 1, 2])],
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("codec", [None, Rotated(4, residual_length=16), KIVI(4, residual_length=16, q_group_size=8)])
@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_those_of_a_resident_cache(deep, name, where, codec, tmp_path):
    deep.set_attn_implementation("sdpa")
    length = 120 if codec is not None else 60
    caches = [
        KVCache(deep, codec=codec),
        CPUOffloadedCache(deep, **SMALL, attend="fetch", codec=codec, **tier(where, tmp_path)),
    ]
    out = []
    for cache in caches:
        feed(deep, cache, IDS, MASK, [length, *[1] * 9])
        OPERATIONS[name](cache)
        seen, parts = cache.get_seq_length(), []
        rows = cache.kv_layers[0].segments.shape[0]
        ids = IDS[torch.arange(rows) % 3]
        mask = cache.kv_layers[0].padding
        full = torch.ones(rows, 300, dtype=torch.long)
        for row in range(rows):
            full[row, : 0 if mask is None else int(mask[row])] = 0
        for _ in range(2):
            parts.append(feed(deep, cache, ids, full, [*[1] * 12, 20, 1, 1], start=seen))
            cache.crop(-34)
        out.append((parts, [cache.kept_positions(i) for i in range(LAYERS)]))
    for a, b in zip(out[0][0] + out[0][1], out[1][0] + out[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("codec", [None, Rotated(4, residual_length=16)], ids=["exact", "packed"])
def test_copies_go_their_own_ways(deep, codec, where, tmp_path):
    deep.set_attn_implementation("sdpa")
    cache = CPUOffloadedCache(deep, **SMALL, attend="fetch", codec=codec, **tier(where, tmp_path))
    feed(deep, cache, IDS, MASK, [100])
    twin = copy.deepcopy(cache)
    assert twin.offloader is not cache.offloader and twin.offloader.disk is cache.offloader.disk
    if codec is None:
        for mine, theirs in zip(cache.kv_layers, twin.kv_layers, strict=True):
            assert mine.segments.runs == theirs.segments.runs != [], "pages are shared, not copied"
    other = IDS.flip(1) * MASK.flip(1).clamp(min=1)
    for each, ids in ((cache, IDS), (twin, other)):
        resident = KVCache(deep, codec=codec)
        feed(deep, resident, IDS, MASK, [100])
        expected = feed(deep, resident, ids, MASK, [1] * 20, start=100)
        assert torch.equal(feed(deep, each, ids, MASK, [1] * 20, start=100), expected)
    del cache
    again = copy.deepcopy(twin)
    expected = feed(deep, twin, other, MASK, [1] * 3, start=120)
    del twin
    assert torch.equal(feed(deep, again, other, MASK, [1] * 3, start=120), expected)


def test_rows_of_beams_that_are_gone_free_their_memory(deep):
    cache = CPUOffloadedCache(deep, **SMALL)
    feed(deep, cache, IDS, MASK, [60])
    held = cache.nbytes_by_tier()["host"]
    cache.reorder_cache(torch.tensor([1, 1, 1]))
    assert cache.nbytes_by_tier()["host"] == held // 3  # three rows of the batch, one stored
    store = cache.kv_layers[0].segments
    assert torch.equal(store.owned("keys")[0], store.owned("keys")[2])


def test_training_steps_keep_the_rows_that_gradients_pass_through(deep):
    deep.set_attn_implementation("sdpa")
    grads = []
    for cache in (KVCache(deep), CPUOffloadedCache(deep, **SMALL, attend="fetch"), CPUOffloadedCache(deep, **SMALL)):
        feed(deep, cache, IDS, MASK, [40])  # no gradients: leaves
        deep.zero_grad()
        positions = (MASK.cumsum(1) - 1).clamp(min=0)
        total = 0.0
        for start, stop in ((40, 60), (60, 61), (61, 80)):
            logits = deep(
                IDS[:, start:stop],
                attention_mask=MASK[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
            ).logits
            total = total + logits.square().mean()
        total.backward()
        grads.append(deep.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert float(grads[0].abs().max()) > 0
    for other in grads[1:]:
        assert torch.allclose(grads[0], other, rtol=1e-4, atol=1e-6)
    deep.zero_grad()


@pytest.mark.parametrize("codec", [None, Rotated(4, residual_length=16)], ids=["exact", "packed"])
def test_inference_mode_then_not(deep, codec, tmp_path):
    deep.set_attn_implementation("sdpa")
    cache = CPUOffloadedCache(deep, **SMALL, codec=codec, attend="fetch", disk=tmp_path, host_bytes=4000)
    resident = KVCache(deep, codec=codec)
    out = []
    for each in (cache, resident):
        with torch.inference_mode():
            feed(deep, each, IDS, MASK, [90, 1, 1])
        part = feed(deep, each, IDS, MASK, [1] * 40, start=92)
        with torch.inference_mode():
            each.reorder_cache(torch.tensor([0, 2, 1]))
        out.append((part, feed(deep, each, IDS, MASK[[0, 2, 1]], [1] * 40, start=132)))
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))


# ---------------------------------------------------------------------- composition


@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("attend", ["fetch", "compute"])
@pytest.mark.parametrize("codec", ["rotated4", "kivi4", None])
def test_snapkv_with_a_codec_and_offload_end_to_end(deep, codec, attend, where, tmp_path):
    """Selection, then codes, then another tier: `generate`, two turns, as without offload."""
    deep.set_attn_implementation("sdpa")
    made = {"rotated4": Rotated(4, residual_length=16), "kivi4": KIVI(4, residual_length=16, q_group_size=8)}.get(codec)
    out = []
    for offload in (None, Offload(**SMALL, attend=attend, **tier(where, tmp_path))):
        cache = SnapKVCache(deep, max_capacity_prompt=96, window_size=8, codec=made, offload=offload)
        first = generate(deep, cache, IDS[:, :150], MASK[:, :150], max_new_tokens=40)
        again = torch.cat([first, IDS[:, :30].clamp(min=2)], dim=1)
        mask = torch.cat([MASK[:, :150], MASK.new_ones(3, again.shape[1] - 150)], dim=1)
        out.append((first, generate(deep, cache, again, mask, max_new_tokens=40)))
        if offload is not None:
            bytes_ = cache.nbytes_by_tier()
            assert bytes_["host"] + bytes_["disk"] > 0 and sum(bytes_.values()) == cache.nbytes
            assert (bytes_["disk"] > 0) == (where != "host" if made is None else bytes_["disk"] > 0)
            kinds = {type(layer.segments) for layer in cache.kv_layers}
            assert kinds == {OffloadedStore if made is None else OffloadedPackedStore}
    assert torch.equal(out[0][0], out[1][0]) and torch.equal(out[0][1], out[1][1])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("codec", [Rotated(4, residual_length=16, num_sink_tokens=3), KIVI(2, residual_length=32)])
def test_packed_pages(deep, codec, where, rows, tmp_path):
    deep.set_attn_implementation("sdpa")
    steps = [150, *[1] * 50, 3, 30, *[1] * 9]
    ids, mask = IDS[:rows], MASK[:rows]
    expected = feed(deep, KVCache(deep, codec=codec), ids, mask, steps)
    fetched = CPUOffloadedCache(deep, **SMALL, attend="fetch", codec=codec, **tier(where, tmp_path))
    assert torch.equal(feed(deep, fetched, ids, mask, steps), expected)
    lying = CPUOffloadedCache(deep, **SMALL, attend="compute", codec=codec, **tier(where, tmp_path))
    ours = feed(deep, lying, ids, mask, [150, *[1] * 50])
    assert float((ours - expected[:, :51]).abs().max()) <= 2e-5
    assert lying.offloader.traffic.to_device == 0
    assert where == "both" or (fetched.nbytes_by_tier()["disk"] > 0) == (where == "disk")


def test_drafts_over_packed_pages(deep):
    deep.set_attn_implementation("sdpa")
    ids = torch.cat([IDS[:1, :60], IDS[:1, :60]], dim=1)
    codec = Rotated(4, residual_length=16)
    expected = generate(deep, KVCache(deep, codec=codec), ids, max_new_tokens=60)
    for attend in ("fetch", "compute"):
        cache = CPUOffloadedCache(deep, **SMALL, attend=attend, codec=codec)
        assert torch.equal(generate(deep, cache, ids, max_new_tokens=60, prompt_lookup_num_tokens=4), expected)
        assert len(cache.offloader.stores) <= LAYERS + 1  # those of drafts are gone


REFUSED = {
    "heavy hitters": (lambda m: HeavyHitterCache(m, 8, 8, offload=Offload()), NotImplementedError, "every step"),
    "window": (lambda m: SlidingWindowCache(m, 8, offload=Offload()), NotImplementedError, "every step"),
    "decode budget": (lambda m: SnapKVCache(m, 64, decode_budget=8, offload=Offload()), NotImplementedError, "every"),
    "adaptive heads": (
        lambda m: SnapKVCache(m, 64, adaptive_heads=True, offload=Offload()),
        NotImplementedError,
        "adaptive_heads",
    ),
    "top pages of codes": (
        lambda m: CPUOffloadedCache(m, top_pages=0.5, codec="rotated-4"),
        NotImplementedError,
        "codec",
    ),
    "top pages of a selection": (
        lambda m: CPUOffloadedCache(m, top_pages=0.5, policy=SnapKV(64)),
        NotImplementedError,
        "SnapKV",
    ),
    "top pages of a config": (lambda m: CPUOffloadedCache(m.config, top_pages=0.5), NotImplementedError, "the model"),
    "compute with a config": (
        lambda m: CPUOffloadedCache(m.config, attend="compute"),
        NotImplementedError,
        "the model",
    ),
    "windows alone": (lambda m: CPUOffloadedCache(model_of("mistral")), NotImplementedError, "no full-attention layer"),
    "latents": (
        lambda m: CPUOffloadedCache(model_of("deepseek_v3"), top_pages=0.5),
        NotImplementedError,
        "have to be fetched",
    ),
    "two offloads": (lambda m: CPUOffloadedCache(m, offload=Offload()), ValueError, "KVCache"),
    "no Offload": (lambda m: KVCache(m, offload="host"), ValueError, "hf_kvcache.Offload"),
    "length": (lambda m: CPUOffloadedCache(m, resident_length=0), ValueError, "resident_length"),
    "page": (lambda m: CPUOffloadedCache(m, page=0), ValueError, "page"),
    "way": (lambda m: CPUOffloadedCache(m, attend="both"), ValueError, "attend"),
    "pin": (lambda m: CPUOffloadedCache(m, pin_memory=1), ValueError, "pin_memory"),
    "share": (lambda m: CPUOffloadedCache(m, top_pages=1.5), ValueError, "top_pages"),
    "count": (lambda m: CPUOffloadedCache(m, top_pages=0), ValueError, "top_pages"),
    "limit without a disk": (lambda m: CPUOffloadedCache(m, host_bytes=1), ValueError, "disk"),
    "negative limit": (lambda m: CPUOffloadedCache(m, host_bytes=-1, disk="."), ValueError, "host_bytes"),
    "no folder": (lambda m: CPUOffloadedCache(m, disk="/no/such/folder"), ValueError, "existing folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make(model_of("llama"))


def test_a_config_is_enough_to_fetch(deep):
    ids = IDS[:, :60]
    expected = generate(deep, dynamic(deep), ids, MASK[:, :60], max_new_tokens=20)
    cache = CPUOffloadedCache(deep.config, **SMALL)
    assert torch.equal(generate(deep, cache, ids, MASK[:, :60], max_new_tokens=20), expected)
    assert cache.kv_layers[0].segments.away_pages > 0


# ---------------------------------------------------------------------- bytes and files


@pytest.mark.parametrize("codec", [None, "rotated4", "kivi4"])
@pytest.mark.parametrize("policy", [None, SnapKV(48, window_size=8)], ids=["all", "snapkv"])
@pytest.mark.parametrize("top", [None, 0.5])
@pytest.mark.parametrize("tokens", [5, 40, 250])
def test_the_formula_of_bytes_in_every_tier(deep, tokens, top, policy, codec, tmp_path):
    if top is not None and (policy is not None or codec is not None):
        pytest.skip("refused, see above")
    made = {"rotated4": Rotated(4, residual_length=8), "kivi4": KIVI(4, residual_length=8)}.get(codec)
    for where in ("host", "disk"):
        more = tier(where, tmp_path) if codec is None else {}
        cache = CPUOffloadedCache(deep, **SMALL, top_pages=top, policy=policy, codec=made, **more)
        expected = cache.expected_bytes(deep.config, 3, tokens)
        feed(deep, cache, IDS[:, :tokens], torch.ones(3, tokens, dtype=torch.long))
        assert cache.nbytes == expected == sum(cache.nbytes_by_tier().values())
        kept = cache.kept_length(0)
        if codec is None and kept >= 10:
            away = (kept - 6) // 4 * 4 * LAYERS * 3 * 2 * 16 * 4
            assert cache.nbytes_by_tier()[where] == away


def test_the_device_holds_the_newest_rows_and_positions_alone(deep):
    cache = CPUOffloadedCache(deep, resident_length=16, page=8, attend="compute")
    feed(deep, cache, IDS[:1], None, [200, *[1] * 40])
    row = 2 * 2 * 8 * 4 + 4
    assert cache.nbytes_by_tier()["device"] <= LAYERS * ((16 + 2 * 8) * row + 240 * 4)
    assert "resident_length=16" in repr(cache) and "host" in repr(cache)


@pytest.mark.parametrize("codec", [None, Rotated(4, residual_length=16)], ids=["exact", "packed"])
@pytest.mark.parametrize("where", TIERS)
def test_files_do_not_say_where_rows_lay(deep, where, codec, tmp_path):
    deep.set_attn_implementation("sdpa")
    offloaded = CPUOffloadedCache(deep, **SMALL, attend="fetch", codec=codec, **tier(where, tmp_path))
    resident = KVCache(deep, codec=codec)
    for cache in (offloaded, resident):
        feed(deep, cache, IDS, MASK, [100, 1])
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    offloaded.save(one)
    resident.save(other)
    assert one.read_bytes() == other.read_bytes()
    expected = feed(deep, resident, IDS, MASK, [1] * 30, start=101)
    there = CPUOffloadedCache(deep, **SMALL, attend="fetch", codec=codec, **tier(where, tmp_path)).load(other)
    assert there.kv_layers[0].segments.is_away
    for cache in (offloaded, there, load(one, deep), KVCache(deep, codec=codec).load(one)):
        assert torch.equal(feed(deep, cache, IDS, MASK, [1] * 30, start=101), expected)


def test_nothing_keeps_a_dropped_cache():
    model = gemma3()
    cache = CPUOffloadedCache(model, **SMALL, attend="fetch")
    generate(model, cache, IDS[:, :40] % 60 + 2, max_new_tokens=20)
    found = [weakref.ref(cache.kv_layers[0].segments), weakref.ref(cache.offloader)]
    gc.disable()
    try:
        del cache
        assert [ref() for ref in found] == [None, None]  # without the garbage collector's help
    finally:
        gc.enable()
