"""Each technique against an independent dense re-computation, at every decode step, alone and in a padded batch."""

from __future__ import annotations

import pytest
import torch

from .common import ATTENTION, EVICTING, LENGTHS, assert_close, batch, feed, model_of, tight
from .dense import H2O, DenseLlama, Rule, Snap, Window

RULES = {
    "kv": lambda: Rule(),
    "window": lambda: Window(6, 2),
    "snapkv": lambda: Snap([10, 10], 4, 3),
    "snapkv_decode": lambda: Snap([10, 10], 4, 3, extra=2),
    # base 6, steepness 3: from 2 * 6 - 2 down to 2, plus the window
    "snapkv_pyramid": lambda: Snap([14, 6], 4, 3),
    "snapkv_maxpool": lambda: Snap([10, 10], 4, 3, maximum=True, sinks=1),
    "h2o": lambda: H2O(4, 4),
    "h2o_ratio": lambda: H2O(0.25, 0.25),
}


def kept(cache, layer, row, shift):
    """Positions held per KV head, counted from the row's first real token."""
    rows = cache.kept_positions(layer)[row]
    return [[p - shift for p in head.tolist() if p >= 0] for head in rows]


def steps(decode, second=0, more=0):
    return [(LENGTHS[0], True)] + [(1, False)] * decode + ([(second, True)] if second else []) + [(1, False)] * more


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("label", RULES)
def test_every_step_equals_the_dense_recomputation(label, rows, attention):
    model = model_of("llama", attention)
    plan = steps(12, second=7, more=4)
    total = sum(size for size, _ in plan)
    ids, mask = batch(rows, more=total - LENGTHS[0])
    cache = tight(label, model)
    oracles = [DenseLlama(RULES[label]()) for _ in range(rows)]
    start = 0
    for number, (size, prompt) in enumerate(plan):
        stop = start + size
        ours = feed(model, cache, ids[:, :stop], mask[:, :stop], start=start, whole=True)
        for row, oracle in enumerate(oracles):
            shift = LENGTHS[0] - LENGTHS[row]
            new = ids[row, max(start, shift) : stop]
            expected = oracle(new, prompt)
            assert_close(ours[row, -len(new) :], expected.float())
            for layer in range(2):
                assert kept(cache, layer, row, shift) == oracle.positions(layer), f"step {number}, row {row}"
        start = stop


@pytest.mark.parametrize("sizes", [(18,), (5, 5, 5, 3), (40,)])
def test_sink_phase_over_fifty_steps(sizes):
    """Sinks move with the stream: one convention from the first eviction on, however the prompt came in."""
    model = model_of("llama")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 96, (1, sum(sizes) + 50), generator=generator)
    cache, oracle = tight("window", model), DenseLlama(Window(6, 2))
    start = 0
    for size in (*sizes, *[1] * 50):
        ours = feed(model, cache, ids[:, : start + size], start=start)
        expected = oracle(ids[0, start : start + size])
        assert_close(ours[0], expected[-1:].float())
        start += size
    assert cache.kept_length() == 8 and cache.get_seq_length() == start


@pytest.mark.parametrize("label", EVICTING)
def test_rows_that_are_held_do_not_depend_on_what_was_dropped(label):
    """Garbage in dropped rows changes nothing: they are gone, not hidden."""
    model = model_of("llama")
    ids, _ = batch(1, more=1)
    cache = tight(label, model)
    feed(model, cache, ids[:, :18])
    rows = cache.layers[0].materialize("keys")
    assert rows.shape[2] == cache.kept_length() < 18
