"""Paged storage: blocks are shared, counted, copied when they are written, and given back."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from contract.common import batch, dynamic, feed, generate, model_of, stock_of
from contract.test_lengths_and_bytes import storages
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import hf_kvcache
from hf_kvcache import BlockPool, HeavyHitterCache, KVCache, QuantizedKIVICache, SlidingWindowCache, SnapKVCache
from hf_kvcache.attention import _packed_sdpa
from hf_kvcache.ops.attention import Extras, attend
from hf_kvcache.paging import pieces
from hf_kvcache.paging.arena import Arena
from hf_kvcache.paging.attend import over_blocks
from hf_kvcache.paging.pieces import pieces_of
from hf_kvcache.segments import PagedSegment, Rows
from hf_kvcache.segments.dense import EMPTY

HEADS, DIM, VALUE_DIM = 2, 4, 6


def rows(batch: int, n: int, start: int = 0, heads: int = 1, dtype: torch.dtype = torch.float32) -> Rows:
    keys = torch.randn(batch, HEADS, n, DIM, dtype=dtype)
    values = torch.randn(batch, HEADS, n, VALUE_DIM, dtype=dtype)
    positions = torch.arange(start, start + n, dtype=torch.int32).expand(batch, heads, n)
    return Rows(keys, values, positions)


def join(parts: list[Rows]) -> Rows:
    heads = max(part.positions.shape[1] for part in parts)
    tables = [part.tensors() | {"positions": part.positions.expand(-1, heads, -1)} for part in parts]
    return Rows(**{name: torch.cat([table[name] for table in tables], dim=2) for name in tables[0]})


def assert_rows(segment: PagedSegment, expected: Rows) -> None:
    for name, tensor in expected.tensors().items():
        assert torch.equal(segment.rows.tensors()[name], tensor), name


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A pool of threads costs tiny models more than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so whoever reads a place that was not written is found out."""
    plain = Arena._buffers

    def poisoned(self: Arena, capacity: int):
        keys, values, positions = plain(self, capacity)
        return keys.fill_(float("nan")), values.fill_(float("nan")), positions.fill_(-77)

    monkeypatch.setattr(Arena, "_buffers", poisoned)


def check_books(pool: BlockPool) -> dict[str, int]:
    """Counts of references and statistics, recounted from the tables by hand."""
    stats = pool.stats()
    counted: dict[int, np.ndarray] = {id(a): np.zeros(a.capacity, int) for a in pool._arenas.values()}
    filled: dict[tuple[int, int], int] = {}
    sequences = 0
    for table in pool._tables.values():
        if table.arena is None:
            continue
        assert table.ids.shape[1] == -(-table.length // pool.block_size), "blocks without a row"
        for row in table.ids.tolist():
            sequences += 1
            for column, block in enumerate(row):
                counted[id(table.arena)][block] += 1
                key = (id(table.arena), block)
                rest = min(pool.block_size, table.length - column * pool.block_size)
                filled[key] = max(filled.get(key, 0), rest)
    for arena in pool._arenas.values():
        assert counted[id(arena)].tolist() == arena.counts.tolist()
    used = len(filled)
    assert stats["used"] == used and stats["used"] + stats["free"] == stats["blocks"]
    assert stats["shared"] == sum(int((counts > 1).sum()) for counts in counted.values())
    assert stats["waste_tokens"] == used * pool.block_size - sum(filled.values())
    assert stats["sequences"] >= sequences - sum(1 for t in pool._tables.values() if not t.ids.size) or not sequences
    assert stats["waste_tokens"] <= stats["sequences"] * (pool.block_size - 1)
    assert stats["bytes"] == pool.nbytes
    return stats


# ---------------------------------------------------------------------- random operations against a plain model


class Machine(RuleBasedStateMachine):
    """Several segments on one pool, each beside a dense copy of what it should hold."""

    @initialize(size=st.integers(1, 5), seed=st.integers(0, 2**16))
    def start(self, size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.pool = BlockPool(size)
        self.held: list[tuple[PagedSegment, Rows | None]] = [(PagedSegment(self.pool, 0), None)]

    def pick(self, data: st.DataObject, filled: bool = False) -> int | None:
        some = [i for i, (_, rows) in enumerate(self.held) if rows is not None or not filled]
        return data.draw(st.sampled_from(some)) if some else None

    @rule(data=st.data(), n=st.integers(1, 12), batch=st.integers(1, 3), pads=st.integers(0, 3))
    def append(self, data: st.DataObject, n: int, batch: int, pads: int) -> None:
        i = self.pick(data)
        segment, held = self.held[i]
        new = rows(batch if held is None else len(held.keys), n, 0 if held is None else held.length)
        segment.append(new)
        if pads and held is None:
            positions = new.positions.clone()
            positions[0, :, :pads] = EMPTY
            segment.mark(positions)
            new.positions = positions
        self.held[i] = segment, new if held is None else join([held, new])

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        segment, held = self.held[self.pick(data)]
        if len(self.held) < 4:
            self.held.append((copy.deepcopy(segment), held))

    @rule(data=st.data(), n=st.integers(1, 9))
    def crop(self, data: st.DataObject, n: int) -> None:
        i = self.pick(data, filled=True)
        if i is None:
            return
        segment, held = self.held[i]
        if n >= held.length:
            segment.clear()
            self.held[i] = segment, None
            return
        segment.crop(n)
        self.held[i] = segment, held.map(lambda t: t[:, :, : t.shape[2] - n])

    @rule(data=st.data(), kind=st.sampled_from(["reorder", "select", "repeat"]))
    def batch_operation(self, data: st.DataObject, kind: str) -> None:
        i = self.pick(data, filled=True)
        if i is None:
            return
        segment, held = self.held[i]
        batch = len(held.keys)
        if kind == "repeat":
            index = torch.arange(batch).repeat_interleave(2) if batch < 4 else torch.arange(batch)
        else:
            size = batch if kind == "reorder" else data.draw(st.integers(1, batch))
            index = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=size, max_size=size)))
        before = self.pool.stats()["used"]
        segment.batch_map(lambda t: t.index_select(0, index))
        assert self.pool.stats()["used"] <= before, "no data is copied"
        self.held[i] = segment, held.map(lambda t: t.index_select(0, index))

    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        i = self.pick(data, filled=True)
        if i is None or self.held[i][1].length < 2:
            return
        segment, held = self.held[i]
        last = held.length - 1
        slots = [data.draw(st.integers(0, last - 1)) for _ in range(len(held.keys))]
        segment.overwrite(torch.tensor(slots)[:, None, None])
        new = held.map(torch.clone)
        for tensor in new.tensors().values():
            for b, slot in enumerate(slots):
                tensor[b, :, slot] = tensor[b, :, last]
        self.held[i] = segment, new.map(lambda t: t[:, :, :last])

    @rule(data=st.data(), n=st.integers(1, 9))
    def replace(self, data: st.DataObject, n: int) -> None:
        i = self.pick(data, filled=True)
        if i is None:
            return
        segment, held = self.held[i]
        kept = held.map(lambda t: t[:, :, -n:].clone())
        kept.positions = kept.positions.expand(-1, HEADS, -1)  # heads may differ from now on
        segment.replace(kept)
        self.held[i] = segment, kept

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        i = self.pick(data)
        del self.held[i]
        if not self.held:
            self.held = [(PagedSegment(self.pool, 0), None)]

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        self.pool.trim()

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "pool"):
            return
        for segment, held in self.held:
            assert segment.length == (0 if held is None else held.length)
            if held is not None:
                wide = segment.rows.positions.shape[1]
                held.positions = held.positions.expand(-1, wide, -1)
                assert_rows(segment, held)
                blocks = len({block for row in segment.table.tolist() for block in row})
                assert segment.nbytes == blocks * segment.arena.block_bytes + segment.table.size * 4
        check_books(self.pool)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.held.clear()
            stats = check_books(self.pool)
            assert stats["used"] == stats["shared"] == stats["sequences"] == 0
            assert all(not arena.counts.any() for arena in self.pool._arenas.values())


TestOperations = Machine.TestCase
TestOperations.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


# ---------------------------------------------------------------------- attention over blocks


def scattered(segment: PagedSegment, seed: int = 0) -> None:
    """Move the blocks of a segment to places that do not lie together."""
    arena, old = segment.arena, segment.table
    order = np.random.RandomState(seed).permutation(arena.capacity).astype(np.int32)
    for tensor in arena.tensors().values():
        tensor[:, torch.from_numpy(order).long()] = tensor.clone()
    counts = arena.counts.copy()
    arena.counts[order] = counts
    segment._table.ids = order[old]


SHAPES = {
    "run": lambda s: s.append(rows(1, 40)),
    "scattered": lambda s: (s.append(rows(1, 40)), scattered(s)),
    "rows apart": lambda s: (s.append(rows(3, 40)), s.append(rows(3, 5))),
    "shared": lambda s: (s.append(rows(1, 37)), s.batch_map(lambda t: t.repeat_interleave(4, 0)), s.append(rows(4, 6))),
    "shared and scattered": lambda s: (
        s.append(rows(1, 37)),
        scattered(s),
        s.batch_map(lambda t: t.repeat_interleave(4, 0)),
        s.append(rows(4, 6)),
    ),
    "two groups": lambda s: (s.append(rows(2, 37)), s.batch_map(lambda t: t[[1, 1, 0, 0]]), s.append(rows(4, 1))),
    "uneven groups": lambda s: (s.append(rows(2, 37)), s.batch_map(lambda t: t[[1, 0, 0, 0]]), s.append(rows(4, 1))),
}


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gathered", [64, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_blocks(shape, masked, new, gathered, monkeypatch) -> None:
    monkeypatch.setattr(pieces, "LEAST_RUN", 2)
    monkeypatch.setattr(pieces, "GATHERED", gathered)
    pieces._pieces.cache_clear()
    segment = PagedSegment(BlockPool(2), 0)
    SHAPES[shape](segment)
    held = segment.rows
    batch, total = len(segment.table), segment.length
    query = torch.randn(batch, 4, new, DIM)
    visible = bias = None
    extras = Extras(0.3)
    if masked:
        visible = torch.rand(batch, 1, new, total) > 0.3
        visible[..., -1] = True
        bias = torch.randn(1, 4, new, total)
        extras = Extras(0.3, softcap=2.0, sinks=torch.randn(4))
    expected = attend(query, held.keys, held.values, extras, visible, bias).output
    found = over_blocks(segment, query, extras, visible, bias)
    assert float((found - expected).abs().max()) <= 1e-6
    if not masked:
        plain = _packed_sdpa(query, held.keys, held.values, None, 0.3)
        assert float((found - plain).abs().max()) <= 1e-6
    pieces._pieces.cache_clear()


def test_a_shared_prefix_is_one_piece() -> None:
    segment = PagedSegment(BlockPool(2), 0)
    SHAPES["shared"](segment)
    first, second = pieces_of(segment.table)
    assert (first.start, first.stop, first.fold, first.step) == (0, 18, 4, 0)
    assert (second.start, second.stop, second.fold) == (18, 22, 1)
    view, whole = segment.read("keys", first), segment.arena.keys
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "read where it lies"
    assert view.shape == (1, HEADS, 36, DIM)


def test_rows_that_lie_together_are_not_copied() -> None:
    pool = BlockPool(4)
    segment = PagedSegment(pool, 0)
    for n in (7, 1, 1, 9, 1):
        segment.append(rows(1, n))
    assert segment.rows.keys.untyped_storage().data_ptr() == segment.arena.keys.untyped_storage().data_ptr()


# ---------------------------------------------------------------------- caches


def test_the_name_is_public() -> None:
    assert "BlockPool" in hf_kvcache.__all__


def keys_of(cache: KVCache) -> list[int]:
    return [layer.segments.arena.keys.data_ptr() for layer in cache.kv_layers]


def test_forks_and_batch_operations_copy_nothing() -> None:
    model, pool = model_of("llama"), BlockPool(4)
    ids, _ = batch(3, more=8)
    cache = KVCache(model, pool=pool)
    feed(model, cache, ids[:, :18])
    used = pool.stats()["used"]
    assert used == 2 * 3 * 5
    alone = cache.nbytes
    fork = copy.deepcopy(cache)
    assert fork.pool is pool and pool.stats()["used"] == used and pool.stats()["shared"] == used
    fork.batch_repeat_interleave(4)
    fork.reorder_cache(torch.arange(12).flip(0))
    assert pool.stats()["used"] == used
    table = 2 * 3 * 5 * 4
    assert cache.nbytes == alone and fork.nbytes == alone - table + 4 * table, "shared blocks count once"
    feed(model, cache, ids, start=18, blocks=[1])  # 18 tokens: the fifth block is half full, and shared
    assert pool.stats()["used"] == used + 2 * 3
    fork.batch_select_indices(torch.tensor([0]))
    assert pool.stats()["used"] == used + 2, "what the fork alone held went back, but for one sequence's partial block"
    del cache, fork
    gc.collect()
    stats = check_books(pool)
    assert stats["used"] == 0 and stats["free"] == stats["blocks"]


def test_a_fork_and_its_origin_go_their_own_ways() -> None:
    model, stock, pool = model_of("llama"), stock_of("llama"), BlockPool(4)
    ids, mask = batch(3, more=20)
    other = ids.flip(0)
    other = torch.cat([ids[:, :18], other[:, 18:]], dim=1)
    cache = KVCache(model, pool=pool)
    feed(model, cache, ids, mask, [18])
    fork = copy.deepcopy(cache)
    for start in range(18, 30):
        for each, tokens in ((cache, ids), (fork, other)):
            feed(model, each, tokens, mask, [1], start=start)
    for each, tokens in ((cache, ids), (fork, other)):
        plain = dynamic(stock)
        feed(stock, plain, tokens, mask, [30])
        for layer, held in zip(each.layers, plain.layers, strict=True):
            real = mask[:, None, :30, None].bool()
            assert torch.allclose(layer.keys * real, held.keys * real, atol=1e-5)
    check_books(pool)


@pytest.mark.parametrize("label", ["kv", "snapkv", "window"])
@pytest.mark.parametrize("tokens", [7, 18, 61])
@pytest.mark.parametrize("number", [1, 3])
def test_the_formula_of_bytes(label, tokens, number) -> None:
    model, pool = model_of("llama"), BlockPool(8)
    make = {
        "kv": lambda: KVCache(model, pool=pool),
        "snapkv": lambda: SnapKVCache(model, 20, window_size=4, pool=pool),
        "window": lambda: SlidingWindowCache(model, 12, num_sink_tokens=2, pool=pool),
    }[label]
    cache = make()
    assert cache.nbytes == 0
    feed(model, cache, torch.randint(2, 90, (number, tokens)))
    assert cache.nbytes == cache.expected_bytes(model.config, number, tokens)
    # All that is reachable: the pool, and besides it nothing of weight.
    tables = sum(layer.segments.table.nbytes for layer in cache.kv_layers)
    others = sum(storages(cache, model).values()) - pool.nbytes
    stats = check_books(pool)
    assert cache.nbytes == stats["used_bytes"] + tables + others
    assert stats["waste_tokens"] < stats["sequences"] * pool.block_size and stats["sequences"] == 2 * number


def test_waste_is_less_than_a_block_for_each_sequence_and_layer() -> None:
    model, pool = model_of("llama"), BlockPool(16)
    caches = [KVCache(model, pool=pool) for _ in range(4)]
    for number, cache in enumerate(caches, 1):
        feed(model, cache, torch.randint(2, 90, (number, 13 * number)))
        stats = check_books(pool)
        assert stats["waste_tokens"] < 16 * stats["sequences"]
    full = sum(2 * number * 13 * number for number in range(1, 5))
    assert stats["used"] * 16 == full + stats["waste_tokens"]


@pytest.mark.parametrize(
    "mode", [dict(num_beams=3), dict(num_beams=4, num_return_sequences=2), dict(do_sample=True, num_return_sequences=3)]
)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("size", [2, 64])
def test_long_generation(mode, number, size) -> None:
    """Long enough that runs, groups and partly filled blocks all come up."""
    model, stock = model_of("llama"), stock_of("llama")
    ids, mask = batch(number)
    ids, mask = torch.cat([ids, ids[:, -18:], ids[:, -18:]], 1), torch.nn.functional.pad(mask, (36, 0), value=0)
    mask[:, :36] = mask[:, 36:37]
    ids = ids.masked_fill(mask == 0, 0)
    pool = BlockPool(size)
    arguments = dict(max_new_tokens=24) | mode
    ours = generate(model, KVCache(model, pool=pool), ids, mask, **arguments)
    assert torch.equal(ours, generate(stock, dynamic(stock), ids, mask, **arguments))
    gc.collect()
    assert check_books(pool)["used"] == 0


@pytest.mark.parametrize("case", ["llama", "gemma3/all", "gpt_oss/all"])
@pytest.mark.parametrize("label", ["snapkv", "window"])
def test_policies_equal_their_dense_selves(label, case) -> None:
    model, pool = model_of(case), BlockPool(4)
    scope = {"scope": "all"} if case.endswith("all") else {}
    make = {
        "snapkv": lambda **kw: SnapKVCache(model, 10, window_size=4, kernel_size=3, **kw, **scope),
        "window": lambda **kw: SlidingWindowCache(model, 6, num_sink_tokens=2, **kw, **scope),
    }[label]
    for mode in (dict(), dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)):
        for number in (1, 3):
            ids, mask = batch(number)
            arguments = dict(max_new_tokens=16) | mode
            expected = generate(model, make(), ids, mask, **arguments)
            assert torch.equal(generate(model, make(pool=pool), ids, mask, **arguments), expected)
    gc.collect()
    assert check_books(pool)["used"] == 0


def test_saved_and_loaded(tmp_path) -> None:
    model, pool = model_of("llama"), BlockPool(4)
    ids, mask = batch(3, more=6)
    path = str(tmp_path / "cache.safetensors")
    cache = KVCache(model, pool=pool)
    feed(model, cache, ids, mask, [18])
    cache.save(path)
    twin = KVCache(model, pool=pool).load(path)
    dense = hf_kvcache.load(path, model)
    assert isinstance(twin.layers[0].segments, PagedSegment) and dense.pool is None
    expected = feed(model, cache, ids, mask, [1, 3], start=18)
    for each in (twin, dense):
        assert torch.allclose(feed(model, each, ids, mask, [1, 3], start=18), expected, atol=1e-5)


def test_training_rows_stay_outside_until_the_step_is_over() -> None:
    pool = BlockPool(4)
    segment = PagedSegment(pool, 0)
    first, second, third = rows(2, 5), rows(2, 3, 5), rows(2, 2, 8)
    segment.append(first)
    second.keys.requires_grad_(True)
    segment.append(second)
    assert segment.rows.keys.requires_grad and pool.stats()["used"] == 0
    segment.rows.keys.sum().backward()
    assert second.keys.grad is not None
    twin = copy.deepcopy(segment)
    with torch.no_grad():
        for each in (segment, twin):
            each.append(third)
            assert not each.rows.keys.requires_grad
            assert_rows(each, join([first, Rows(second.keys.detach(), second.values, second.positions), third]))
    assert check_books(pool)["used"] == 2 * 2 * 3


def test_a_training_step_is_not_disturbed_by_other_caches() -> None:
    """Only the queries need gradients: what they read may not change under them, wherever others write."""
    pool = BlockPool(4)
    one, two = PagedSegment(pool, 0), PagedSegment(pool, 0)
    one.append(rows(1, 10))
    query = torch.randn(1, 2, 1, DIM, requires_grad=True)
    held = one.rows
    output = attend(query, held.keys, held.values, Extras(1.0)).output
    two.append(rows(1, 6))
    one.append(rows(1, 1, 10))
    output.sum().backward()
    assert torch.isfinite(query.grad).all()


# ---------------------------------------------------------------------- limits, threads, bad use


def test_a_full_pool_refuses_and_nothing_is_lost() -> None:
    block = 4 * (HEADS * (DIM + VALUE_DIM) * 4 + 4)
    pool = BlockPool(4, max_bytes=5 * block)
    one, two = PagedSegment(pool, 0), PagedSegment(pool, 0)
    held = rows(1, 14)
    one.append(held)
    fork = copy.deepcopy(one)
    two.append(rows(1, 3))
    for segment, more in ((two, 2), (one, 1), (one, 3)):
        before, stats = segment.length, pool.stats()
        with pytest.raises(MemoryError, match="max_bytes"):
            segment.append(rows(1, more, before))
        assert segment.length == before and check_books(pool) == stats
    assert_rows(one, held)
    assert pool.nbytes <= 5 * block
    two.clear()
    one.append(rows(1, 2, 14))
    assert_rows(fork, held)
    # Free blocks of one kind make room for another.
    one.clear()
    del fork
    gc.collect()
    wide = PagedSegment(pool, 1)
    wide.append(rows(1, 20))
    assert pool.nbytes <= 5 * block


def test_trim_gives_memory_back() -> None:
    pool = BlockPool(4)
    kept, gone = PagedSegment(pool, 0), PagedSegment(pool, 0)
    held = rows(1, 6)
    kept.append(held)
    gone.append(rows(3, 50))
    gone.clear()
    before = pool.nbytes
    pool.trim()
    assert pool.nbytes == 2 * kept.arena.block_bytes < before
    assert_rows(kept, held)
    kept.append(rows(1, 9, 6))
    check_books(pool)


def test_threads_on_one_pool() -> None:
    """Each thread reads back what it wrote, while buffers grow and blocks change hands under it."""
    pool, failures = BlockPool(2), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(n: int) -> int:
            return int(torch.randint(0, n, (), generator=generator))

        try:
            for round_ in range(12):
                segment, held = PagedSegment(pool, draw(2)), []
                for step in range(20):
                    value = float(seed * 10000 + round_ * 100 + step)
                    n = 1 + draw(4)
                    keys = torch.full((2, HEADS, n, DIM), value)
                    positions = torch.full((2, 1, n), step, dtype=torch.int32)
                    segment.append(Rows(keys, torch.full((2, HEADS, n, VALUE_DIM), value), positions))
                    held += [value] * n
                    if draw(4) == 0:
                        segment = copy.deepcopy(segment)
                    if draw(5) == 0:
                        cut = 1 + draw(2)
                        if cut < len(held):
                            segment.crop(cut)
                            held = held[:-cut]
                    found = segment.rows
                    assert found.keys[:, 0, :, 0].tolist() == [held, held]
                    assert found.values[:, 1, :, 5].tolist() == [held, held]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    gc.collect()
    assert check_books(pool)["used"] == 0


def test_garbage_collected_in_the_middle_of_an_operation() -> None:
    """A finalizer may run while the pool's lock is held by the same thread; it must not touch the books then."""
    pool = BlockPool(2)
    segment, other = PagedSegment(pool, 0), PagedSegment(pool, 0)
    segment.append(rows(1, 8))
    other.append(rows(1, 4))
    with pool.lock:
        counts = segment.arena.counts.copy()
        del other
        gc.collect()
        assert segment.arena.counts.tolist() == counts.tolist()
    assert check_books(pool)["used"] == 4


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "64"])
def test_sizes_that_are_none(size) -> None:
    with pytest.raises(ValueError, match="block_size"):
        BlockPool(size)
    with pytest.raises(ValueError, match="max_bytes"):
        BlockPool(64, max_bytes=size)


def test_what_a_pool_does_not_go_with() -> None:
    model, pool = model_of("llama"), BlockPool()
    for make, reason in (
        (lambda: KVCache(model, pool=64), "BlockPool"),
        (lambda: KVCache(model, codec="int4", pool=pool), "codec"),
        (lambda: QuantizedKIVICache(model, pool=pool), "codec"),
        (lambda: HeavyHitterCache(model, 8, 8, pool=pool), "each head"),
        (lambda: SnapKVCache(model, 16, window_size=4, decode_budget=2, pool=pool), "decode_budget"),
        (lambda: SnapKVCache(model, 16, window_size=4, adaptive_heads=True, pool=pool), "adaptive_heads"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=reason):
            make()


def test_a_pool_is_not_pickled() -> None:
    import pickle

    with pytest.raises(TypeError, match="save"):
        pickle.dumps(BlockPool())
