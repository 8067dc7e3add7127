"""Every causal-LM model type of the installed transformers builds tiny and generates with a DynamicCache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_kvcache.cache import own_cache_reason
from hf_kvcache.compat import shrink

NEW_TOKENS = 8
PARAMETER_LIMIT = 5_000_000


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_unknown_type_is_an_error():
    with pytest.raises(shrink.ShrinkError, match="no_such_type"):
        shrink.build("no_such_type")


def test_same_seed_same_weights():
    first, again, other = (shrink.build("llama", seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_left_padded_rows_equal_rows_alone_and_depend_on_the_mask():
    model = shrink.build("llama")
    inputs = shrink.sample_inputs(model, batch=2)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    together = model.generate(**inputs, **options)[:, -NEW_TOKENS:]
    for row, mask in enumerate(inputs["attention_mask"]):
        alone = model.generate(inputs["input_ids"][row : row + 1, mask.bool()], **options)[:, -NEW_TOKENS:]
        assert torch.equal(alone[0], together[row])
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    assert not torch.equal(model.generate(**inputs, **options)[1, -NEW_TOKENS:], together[1])


@pytest.mark.parametrize("model_type", shrink.causal_lm_types())
def test_builds_and_generates(model_type: str):
    model = shrink.build(model_type)
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < PARAMETER_LIMIT
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if own_cache_reason(model) is not None:
        return
    for batch in (1, 2):
        inputs = shrink.sample_inputs(model, batch=batch)
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        output = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            **{shrink.cache_argument(model): cache},
        )
        # Models of audio codes fold the codebooks into a dimension of their own and trim their delay pattern.
        assert output.shape[0] == batch or output.shape[0] == inputs["input_ids"].shape[0]
        if output.dim() == 2:
            assert output.shape[1] == inputs["input_ids"].shape[1] + NEW_TOKENS
        assert cache.get_seq_length() > 0
