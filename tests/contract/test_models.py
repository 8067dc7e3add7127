"""The tiny models are worth testing with: a wrong mask, a dropped extra or a lost row changes their tokens."""

from __future__ import annotations

import pytest
import torch

from .common import MODELS, batch, dynamic, feed, generate, model_of, stock_of, tight

NAMES = sorted({case.partition("/")[0] for case in MODELS})


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_mask_changes_tokens(name):
    model = stock_of(name, "eager")
    ids, mask = batch(3)
    right, wrong = (feed(model, dynamic(model), ids, m, whole=True).argmax(-1) for m in (mask, torch.ones_like(mask)))
    assert torch.equal(right[0], wrong[0])  # the row without padding
    assert (right[2] != wrong[2])[-6:].sum() >= 2  # its padding lies inside every window


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_not_flat_and_tokens_vary(name):
    model = stock_of(name, "eager")
    ids, mask = batch(1)
    assert feed(model, dynamic(model), ids, mask).std() > 0.7
    assert len(set(generate(model, dynamic(model), ids, max_new_tokens=16)[0, ids.shape[1] :].tolist())) > 4


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "gemma3", "deepseek_v3"])
def test_eviction_changes_logits(name):
    """Otherwise equality of an evicting cache with anything would prove nothing."""
    model, stock = model_of(name, "eager"), stock_of(name, "eager")
    ids, _ = batch(1, more=4)
    blocks = [18, 1, 1, 1, 1]
    full = feed(stock, dynamic(stock), ids, blocks=blocks)
    for label in ("window", "snapkv", "h2o"):
        ours = feed(model, tight(label, model), ids, blocks=blocks)
        assert float((ours - full)[:, 1:].abs().max()) > 0.05
