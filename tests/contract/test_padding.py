"""Point 4: a padded row gives what it gives alone, whatever was dropped, in every turn."""

from __future__ import annotations

import pytest
import torch

from .common import LENGTHS, TOLERANCE, batch, dynamic, feed, generate, model_of, roomy, stock_of, tight
from .test_lossless import over_the_matrix

BLOCKS = [18, 1, 1, 1, 5, 1, 1]


@over_the_matrix
def test_padded_row_equals_the_row_alone(label, case, attention, rows, dtype):
    """`rows` = 1 is one padded row, whose padding no other row excuses."""
    ids, mask = batch(3, more=sum(BLOCKS) - LENGTHS[0])
    if rows == 1:
        ids, mask = ids[1:2], mask[1:2]
    model = model_of(case, attention, dtype)
    cache = tight(label, model, case)
    together = feed(model, cache, ids, mask, BLOCKS)
    for row in range(len(ids)):
        pad = int((mask[row] == 0).sum())
        solo = tight(label, model, case)
        alone = feed(model, solo, ids[row : row + 1, pad:], blocks=[BLOCKS[0] - pad, *BLOCKS[1:]])
        same = positions(cache, row, pad) == positions(solo, 0, 0)
        if dtype == "fp32":
            assert same
        elif not same:
            # Two scores within a rounding error of each other: bf16 may drop either.
            continue
        assert float((together[row] - alone[0]).abs().max()) <= TOLERANCE[dtype]


def positions(cache, row, pad):
    """Held positions that a later query can still see, per layer and KV head, counted from the first real token."""
    found = []
    for layer in cache.kv_layers:
        first = max(0, layer.get_seq_length() - (layer.sliding_window or 10**6) + 1)
        found.append([[p - pad for p in head.tolist() if p >= first] for head in layer.kept_positions()[row]])
    return found


@pytest.mark.parametrize("case", ["llama", "gemma3/all", "deepseek_v3", "deepseek_v3/absorb"])
@pytest.mark.parametrize("label", ["kv", "window", "snapkv_decode", "h2o", "h2o_ratio"])
def test_generated_tokens_of_padded_rows(label, case):
    model = model_of(case)
    ids, mask = batch(3)
    together = generate(model, tight(label, model, case), ids, mask, max_new_tokens=10)
    for row, length in enumerate(LENGTHS):
        alone = generate(model, tight(label, model, case), ids[row : row + 1, -length:], max_new_tokens=10)
        assert torch.equal(together[row, -10:], alone[0, -10:])


@pytest.mark.parametrize("case", ["llama", "gemma3", "gemma3/all", "gpt_oss/all"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_inside_the_history(case, attention):
    """A second turn of different lengths: its padding stands in the middle of the sequence."""
    ids, mask = batch(3, more=12)
    mask[1, 20:23] = 0
    mask[2, 20:25] = 0
    blocks = [18, 1, 1, 7, 1, 1, 1]
    model, stock = model_of(case, attention), stock_of(case, attention)
    expected = feed(stock, dynamic(stock), ids, mask, blocks)
    for label in ("kv", "window", "snapkv", "h2o"):
        ours = feed(model, roomy(label, model, case), ids, mask, blocks)
        assert float((ours - expected).abs().max()) <= TOLERANCE["fp32"], label


@pytest.mark.parametrize("case", ["llama", "gemma3/all", "gpt_oss/all"])
def test_lengths_around_the_models_own_window(case):
    """Prompts just below, at and above the window, against the uncached forward."""
    model, stock = model_of(case), stock_of(case)
    generator = torch.Generator().manual_seed(2)
    for length in (7, 8, 9, 24):
        ids = torch.randint(2, 96, (1, length + 4), generator=generator)
        with torch.no_grad():
            expected = stock(ids, use_cache=False).logits
        for label in ("kv", "snapkv", "window", "h2o"):
            ours = feed(model, roomy(label, model, case), ids, blocks=[length, 1, 1, 1, 1], whole=True)
            assert float((ours - expected).abs().max()) <= TOLERANCE["fp32"], (label, length)
