"""Point 2: where nothing is lost, the result is DynamicCache's.  Point 3: attend, then drop.

The full cross product of models, attention, batch, dtype and caches is here and in `test_padding.py`; generation modes
are tried on one model of each kind.
"""

from __future__ import annotations

import functools

import pytest
import torch

from .common import (
    ATTENTION,
    CACHE,
    CACHES,
    DTYPES,
    KEEPING,
    LOSSLESS,
    MODELS,
    assert_close,
    batch,
    dynamic,
    feed,
    generate,
    model_of,
    roomy,
    stock_of,
    tight,
)

matrix = [
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("rows", [1, 3]),
    pytest.mark.parametrize("attention", ATTENTION),
    pytest.mark.parametrize("case", MODELS),
    pytest.mark.parametrize("label", CACHES),
]


def over_the_matrix(test):
    return functools.reduce(lambda fn, mark: mark(fn), matrix, test)


BLOCKS = [18, 1, 1, 1, 3, 1]


@functools.cache
def oracle(case, attention, rows, dtype):
    stock = stock_of(case, attention, dtype)
    ids, mask = batch(rows, more=7)
    return feed(stock, dynamic(stock), ids, mask, BLOCKS, whole=True)


def real(logits, mask):
    """Logits at real tokens only: what padding positions give is not defined."""
    return logits[mask[:, : logits.shape[1]].bool()]


@over_the_matrix
def test_lossless_logits(label, case, attention, rows, dtype):
    ids, mask = batch(rows, more=7)
    model = model_of(case, attention, dtype)
    expected = oracle(case, attention, rows, dtype)
    # Budgets that are shares of the prompt hold the prompt only; the step after it still sees every row.
    blocks = BLOCKS if label in LOSSLESS else BLOCKS[:2]
    ours = feed(model, roomy(label, model, case), ids, mask, blocks, whole=True)
    assert_close(real(ours, mask), real(expected[:, : ours.shape[1]], mask), dtype)


@over_the_matrix
def test_prefill_is_exact_whatever_the_budget(label, case, attention, rows, dtype):
    ids, mask = batch(rows)
    model = model_of(case, attention, dtype)
    ours = feed(model, tight(label, model, case), ids, mask, whole=True)
    assert_close(real(ours, mask), real(oracle(case, attention, rows, dtype)[:, :18], mask), dtype)


# ---------------------------------------------------------------------- generation modes

MODES = {
    "greedy": dict(max_new_tokens=12),
    "sampled": dict(do_sample=True, temperature=0.8),
    "num_return_sequences": dict(do_sample=True, num_return_sequences=2),
    "beams": dict(num_beams=3),
    "beams_sampled": dict(num_beams=2, do_sample=True, num_return_sequences=2),
    "prefill_chunks": dict(prefill_chunk_size=5),
}
KINDS = ["llama", "mistral/all", "gemma3", "gemma3/all", "gpt_oss/all", "gemma2", "deepseek_v3", "deepseek_v3/absorb"]
KINDS += ["converted", "converted/absorb"]


@functools.cache
def generated(case, attention, rows, mode):
    stock = stock_of(case, attention)
    ids, mask = batch(rows)
    return generate(stock, dynamic(stock), ids, mask, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", KINDS)
def test_generation_modes(case, rows, mode):
    # Prompts in chunks, and rows whose budgets are shares of a prompt, are compared where nothing is dropped.
    for attention, labels in (("sdpa", LOSSLESS), ("eager", ("kv", "h2o"))):
        model = model_of(case, attention)
        for label in labels:
            ids, mask = batch(rows)
            ours = generate(model, roomy(label, model, case), ids, mask, **MODES[mode])
            assert torch.equal(ours, generated(case, attention, rows, mode)), (label, attention)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("label", LOSSLESS)
def test_greedy_tokens_of_every_model(label, case):
    for rows in (1, 3):
        ids, mask = batch(rows)
        model = model_of(case)
        ours = generate(model, roomy(label, model, case), ids, mask, **MODES["greedy"])
        assert torch.equal(ours, generated(case, "sdpa", rows, "greedy"))


def repeated_prompt():
    """A prompt with repetitions, for prompt lookup to find something in."""
    ids, _ = batch(1)
    return torch.cat([ids[:, :9], ids[:, :9], ids[:, :4]], dim=1)


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("label", LOSSLESS)
def test_drafted_decoding(label, case):
    """Prompt lookup and a second model: drafts are rejected often, so this is rollback under load."""
    if case in ("deepseek_v3", "converted") and label not in KEEPING:
        pytest.skip("eviction refuses drafts on MLA models; see test_operations.py")
    model, stock = model_of(case), stock_of(case)
    ids = repeated_prompt()
    expected = generate(stock, dynamic(stock), ids, max_new_tokens=16)
    for mode in (dict(prompt_lookup_num_tokens=4), dict(assistant_model=stock_of("qwen2"))):
        ours = generate(model, roomy(label, model, case), ids, max_new_tokens=16, **mode)
        assert torch.equal(ours, expected), mode


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_turns_with_the_full_history_passed_again(case, rows):
    model, stock = model_of(case), stock_of(case)
    more, _ = batch(rows, lengths=(5, 5, 5))
    for label in LOSSLESS:
        states = []
        for this, cache in ((stock, dynamic(stock)), (model, roomy(label, model, case))):
            ids, mask = batch(rows)
            for _ in range(3):
                ids = generate(this, cache, ids, mask, max_new_tokens=5)
                ids = torch.cat([ids, more], dim=1)
                mask = torch.cat([mask, mask.new_ones(rows, ids.shape[1] - mask.shape[1])], dim=1)
            states.append(ids)
        assert torch.equal(*states), label


@pytest.mark.parametrize("case", ["llama", "gemma3/all", "deepseek_v3", "deepseek_v3/absorb"])
@pytest.mark.parametrize("label", LOSSLESS)
def test_embeddings_as_input_on_both_turns(label, case):
    model, stock = model_of(case), stock_of(case)
    results = []
    for this, cache in ((stock, dynamic(stock)), (model, roomy(label, model, case))):
        ids, mask = batch(3)
        embed = this.get_input_embeddings()
        with torch.no_grad():
            first = this.generate(
                inputs_embeds=embed(ids), attention_mask=mask, max_new_tokens=4, do_sample=False, **{CACHE: cache}
            )
            seen = cache.get_seq_length()
            turn = torch.cat([first[:, seen - ids.shape[1] :], ids[:, -3:]], dim=1)
            mask = torch.cat([mask, mask.new_ones(3, seen + turn.shape[1] - mask.shape[1])], dim=1)
            logits = this(inputs_embeds=embed(turn), attention_mask=mask, **{CACHE: cache}).logits
        results.append((first, logits))
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[1][1], results[0][1])


def test_both_names_of_the_argument():
    model, stock = model_of("llama"), stock_of("llama")
    ids, mask = batch(1)
    expected = generate(stock, dynamic(stock), ids, mask)
    for name in {"past_key_values", CACHE}:
        ours = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **{name: roomy("kv", model)}
        )
        assert torch.equal(ours, expected)


def test_a_batch_one_prefix_for_several_sequences():
    """A prefix that was read once, then repeated by hand for three continuations."""
    model, stock = model_of("llama"), stock_of("llama")
    ids, _ = batch(1)
    sample = dict(do_sample=True, num_return_sequences=3)
    results = []
    for this, cache in ((stock, dynamic(stock)), (model, roomy("kv", model))):
        feed(this, cache, ids[:, :10])
        cache.batch_repeat_interleave(3)
        results.append(generate(this, cache, ids, **sample))
    assert torch.equal(*results)
    cache = roomy("kv", model)
    feed(model, cache, ids[:, :10])
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        generate(model, cache, ids, **sample)
