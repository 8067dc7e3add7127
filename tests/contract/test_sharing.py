"""Layers that share, against a stock model whose followers are handed their source's keys, and against own runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3nTextConfig, PreTrainedModel, T5Config

from hf_kvcache import CrossLayerSharedCache, HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache, load
from hf_kvcache.codecs import KIVI, Rotated
from hf_kvcache.sharing import FollowerLayer
from hf_kvcache.sharing.groups import check_devices

from .common import (
    ATTENTION,
    CACHE,
    EAGER_ORACLE,
    LENGTHS,
    _config,
    assert_close,
    batch,
    feed,
    generate,
)
from .dense import H2O, DenseLlama, Rule, Snap, Window
from .test_lengths_and_bytes import storages
from .test_operations import assert_same_state, blocks_of

# case -> map that `sharing=2` stands for; "/all" takes windowed layers over as well
CASES = {
    "llama": {1: 0, 3: 2},
    "qwen2": {1: 0, 3: 2},
    "mistral/all": {1: 0, 3: 2},
    "gemma3": {3: 1},
    "gemma3/all": {2: 0, 3: 1},
    "gpt_oss/all": {2: 0, 3: 1},
    "gemma2/all": {2: 0, 3: 1},
}
PAIRS = CASES["llama"]


@functools.cache
def _built(name: str) -> PreTrainedModel:
    config = _config(name)
    config.num_hidden_layers = 4
    if name in ("gemma3", "gpt_oss", "gemma2"):
        config.layer_types = ["sliding_attention", "full_attention"] * 2
    elif getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * 4
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "sinks" in key:
                parameter.normal_(0, 1)
            elif not parameter.any() or bool((parameter == 1).all()):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.startswith("gemma") and key.endswith("post_attention_layernorm.weight"):
                parameter.add_(3)
    model.generation_config.pad_token_id = 0
    return model


@functools.cache
def model_of(case: str, attention: str = "sdpa") -> PreTrainedModel:
    model = copy.deepcopy(_built(case.partition("/")[0]))
    model.config._attn_implementation_internal = attention
    return model


@functools.cache
def stock_of(case: str, attention: str = "sdpa") -> PreTrainedModel:
    name = case.partition("/")[0]
    model = copy.deepcopy(_built(name))
    model.config._attn_implementation_internal = "eager" if name in EAGER_ORACLE else attention
    return model


class Oracle(DynamicCache):
    """transformers' own cache; a follower is handed what its source was handed in the same step."""

    def __init__(self, config: Any, sharing: dict[int, int]) -> None:
        super().__init__(config=config)
        self.sharing, self.given = sharing, {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx not in self.sharing:
            self.given[layer_idx] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.given[self.sharing.get(layer_idx, layer_idx)]

    def crop(self, tokens_to_remove):
        for index, layer in enumerate(self.layers):
            if index not in self.sharing:  # followers were never filled
                layer.crop(tokens_to_remove)


def oracle(case: str, attention: str = "sdpa") -> tuple[PreTrainedModel, Oracle]:
    stock = stock_of(case, attention)
    return stock, Oracle(stock.config, CASES[case])


def shared(case: str, attention: str = "sdpa", **parts: Any) -> tuple[PreTrainedModel, KVCache]:
    model = model_of(case, attention)
    parts = {"sharing": 2} | ({"scope": "all"} if case.endswith("/all") else {}) | parts
    return model, CrossLayerSharedCache(model, **parts)


Make = Callable[..., KVCache]
# Caches that lose rows or bits beside sharing layers.
DROPPING: dict[str, Make] = {
    "window": lambda model, **parts: SlidingWindowCache(model, 6, 2, **parts),
    "snapkv": lambda model, **parts: SnapKVCache(model, 10, window_size=4, kernel_size=3, **parts),
    "snapkv_decode": lambda m, **parts: SnapKVCache(m, 10, window_size=4, kernel_size=3, decode_budget=2, **parts),
    "snapkv_adaptive": lambda m, **parts: SnapKVCache(
        m, 10, window_size=4, kernel_size=3, adaptive_heads=True, **parts
    ),
    "h2o": lambda model, **parts: HeavyHitterCache(model, 4, 4, **parts),
}
CODED: dict[str, Make] = {
    "kivi": lambda model, **parts: KVCache(model, codec=KIVI(4, residual_length=8, num_sink_tokens=2), **parts),
    "window_kivi": lambda model, **parts: SlidingWindowCache(
        model, 70, 2, codec=KIVI(4, residual_length=8, num_sink_tokens=2), **parts
    ),
    "snapkv_rotated": lambda model, **parts: SnapKVCache(
        model, 60, window_size=4, kernel_size=3, codec=Rotated(3, residual_length=8), **parts
    ),
    "h2o_rotated": lambda model, **parts: HeavyHitterCache(model, 30, 30, codec=Rotated(3, residual_length=8), **parts),
}
OWN: dict[str, Make] = {"keep": KVCache, **DROPPING}
over_own = pytest.mark.parametrize("label", OWN)
BLOCKS = [18, 1, 1, 1, 5, 1, 2, 1]


# ---------------------------------------------------------------------- equal to a model that shares


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_model_whose_followers_read_their_sources(case, attention, rows):
    """Left padding, a second turn of five tokens, decoding: within 1e-5 of the scale of the logits."""
    ids, mask = batch(rows, more=sum(BLOCKS) - 18)
    expected = feed(*oracle(case, attention), ids, mask, BLOCKS, whole=True)
    ours = feed(*shared(case, attention), ids, mask, BLOCKS, whole=True)
    real = mask.bool()
    assert_close(ours[real], expected[real])
    assert float((ours[real] - expected[real]).abs().max()) <= 1e-5 * max(1.0, float(expected[real].abs().max()))
    alone = feed(stock_of(case, attention), DynamicCache(config=stock_of(case).config), ids, mask, BLOCKS, whole=True)
    assert float((ours[real] - alone[real]).abs().max()) > 0.05, "sharing changes what this model says"


MODES = {
    "greedy": dict(max_new_tokens=12),
    "sampled": dict(do_sample=True, temperature=0.8),
    "beams": dict(num_beams=3),
    "prefill_chunks": dict(prefill_chunk_size=5),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_generation_modes(case, mode):
    for rows in (1, 3):
        ids, mask = batch(rows)
        ours = generate(*shared(case), ids, mask, **MODES[mode])
        assert torch.equal(ours, generate(*oracle(case), ids, mask, **MODES[mode])), rows


@pytest.mark.parametrize("case", CASES)
def test_drafts(case):
    ids, _ = batch(1)
    ids = torch.cat([ids[:, :9], ids[:, :9], ids[:, :4]], dim=1)
    expected = generate(*oracle(case), ids, max_new_tokens=16)
    for mode in (dict(prompt_lookup_num_tokens=4), dict(assistant_model=stock_of("qwen2"))):
        assert torch.equal(generate(*shared(case), ids, max_new_tokens=16, **mode), expected), mode


@pytest.mark.parametrize("case", CASES)
def test_two_turns_with_the_history_passed_again(case):
    more, _ = batch(3, lengths=(5, 5, 5))
    found = []
    for model, cache in (oracle(case), shared(case)):
        ids, mask = batch(3)
        for _ in range(3):
            ids = torch.cat([generate(model, cache, ids, mask, max_new_tokens=5), more], dim=1)
            mask = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], dim=1)
        found.append(ids)
    assert torch.equal(*found)


def test_maps_and_larger_groups():
    ids, mask = batch(3, more=12)
    stock = stock_of("llama")
    for sharing, pairs in ((4, {1: 0, 2: 0, 3: 0}), (3, {1: 0, 2: 0}), ({3: 1}, {3: 1}), ({2: 0, 3: 1}, {2: 0, 3: 1})):
        model, cache = shared("llama", sharing=sharing)
        assert cache.sharing == pairs
        ours = feed(model, cache, ids, mask, BLOCKS)
        assert_close(ours, feed(stock, Oracle(stock.config, pairs), ids, mask, BLOCKS))


def test_from_a_config_and_on_a_model_with_attention_of_its_own():
    """Where attention does not go through this library, followers are handed their source's tensors."""
    ids, mask = batch(3, more=12)
    stock = stock_of("llama")
    expected = feed(*oracle("llama"), ids, mask, BLOCKS)
    assert_close(feed(stock, CrossLayerSharedCache(stock.config), ids, mask, BLOCKS), expected)
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(3)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.2))
    bloom = bloom.eval()

    def read(cache):
        with torch.no_grad():
            out = [bloom(ids[:, :18], attention_mask=mask[:, :18], **{CACHE: cache}).logits[:, -1]]
            out += [
                bloom(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], **{CACHE: cache}).logits[:, -1]
                for i in (18, 19)
            ]
        return torch.stack(out)

    assert_close(read(CrossLayerSharedCache(bloom)), read(Oracle(bloom.config, PAIRS)))


def deeper(name: str) -> PreTrainedModel:
    """The tiny model of a type with its layers twice, where no two of them are of one kind."""
    from hf_kvcache.compat.shrink import build

    model = build(name)
    config = model.config
    lists = {field: list(getattr(config, field, None) or []) for field in ("layer_types", "no_rope_layers")}
    if config.num_hidden_layers > 3 or all(len(set(values)) < 2 for values in lists.values()):
        return model
    for field, values in lists.items():
        if values:
            setattr(config, field, values * 2)
    config.num_hidden_layers *= 2
    torch.manual_seed(1)
    return type(model)(config).eval()


@pytest.mark.parametrize("name", ["diffllama", "jamba", "llama4_text", "smollm3", "gpt_neox", "olmo2"])
def test_other_models(name):
    """Values changed before attention, linear layers in between, lengths asked by layer, joined projections, norms."""
    model = deeper(name)
    ids, mask = batch(2, more=8)
    ids = ids % model.config.vocab_size
    cache = CrossLayerSharedCache(model, scope="all" if name == "llama4_text" else "full")
    expected = feed(model, Oracle(model.config, cache.sharing), ids, mask, [18, 1, 1, 4, 1])
    assert_close(feed(model, cache, ids, mask, [18, 1, 1, 4, 1]), expected)


# ---------------------------------------------------------------------- policies: an independent dense re-computation


RULES = {
    "keep": lambda: Rule(),
    "window": lambda: Window(6, 2),
    "snapkv": lambda: Snap([10] * 4, 4, 3),
    "snapkv_decode": lambda: Snap([10] * 4, 4, 3, extra=2),
    "h2o": lambda: H2O(4, 4),
}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("sharing", [2, {2: 0, 3: 0}], ids=["pairs", "map"])
@pytest.mark.parametrize("label", RULES)
def test_what_is_dropped_is_decided_by_all_readers(label, sharing, attention):
    """Positions and logits of every step, each row of a padded batch, against a dense model in float64."""
    ids, mask = batch(3, more=14)
    model = model_of("llama", attention)
    cache = OWN[label](model, sharing=sharing)
    blocks = [18, 1, 1, 1, 1, 6, 1, 1, 1, 1]
    dense = [DenseLlama(RULES[label](), _built("llama"), cache.sharing) for _ in LENGTHS]
    start = 0
    for index, size in enumerate(blocks):
        logits = feed(model, cache, ids[:, : start + size], mask[:, : start + size], start=start)
        for row, length in enumerate(LENGTHS):
            pad = LENGTHS[0] - length
            given = ids[row, max(start, pad) : start + size]
            expected = dense[row](given, prompt=size > 1)[-1]
            assert_close(logits[row, -1], expected.float())
            for layer in (0, 1, 2, 3):
                held = [[p - pad for p in head.tolist() if p >= 0] for head in cache.kept_positions(layer)[row]]
                assert held == dense[row].positions(cache.sharing.get(layer, layer)), (index, row, layer)
        start += size


# ---------------------------------------------------------------------- against runs of its own


def own(label: str, case: str = "llama", attention: str = "sdpa") -> tuple[PreTrainedModel, KVCache]:
    model = model_of(case, attention)
    scope = {"scope": "all"} if case.endswith("/all") else {}
    return model, (OWN | CODED)[label](model, sharing=2, **scope)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("case", ["llama", "gemma3/all", "gpt_oss/all"])
@over_own
def test_a_padded_row_gives_what_it_gives_alone(label, case, attention):
    ids, mask = batch(3, more=sum(BLOCKS) - 18)
    together = feed(*own(label, case, attention), ids, mask, BLOCKS)
    for row, length in enumerate(LENGTHS):
        pad = LENGTHS[0] - length
        alone = feed(*own(label, case, attention), ids[row : row + 1, pad:], blocks=[18 - pad, *BLOCKS[1:]])
        assert_close(together[row], alone[0])


@over_own
def test_rollback_leaves_no_trace(label):
    ids, mask = batch(3, more=30)
    junk = torch.randint(2, 96, ids.shape)
    model, dirty = own(label)
    _, clean = own(label)
    for cache in (dirty, clean):
        cache.activate_past_recording()
    start = 0
    for good, bad in ((18, 2), (1, 4), (3, 2), (2, 0), (1, 1), (1, 3)):
        stop = start + good
        wrong = torch.cat([ids[:, :stop], junk[:, stop : stop + bad]], dim=1)
        ours = feed(model, dirty, wrong, mask[:, : stop + bad], start=start, whole=True)
        expected = feed(model, clean, ids[:, :stop], mask[:, :stop], start=start, whole=True)
        real = mask[:, start:stop].bool()
        assert_close(ours[:, :good][real], expected[real])
        dirty.crop(-bad)
        clean.crop(0)
        assert_same_state(dirty, clean, exact=False)
        start = stop


@pytest.mark.parametrize("label", DROPPING)
def test_drafts_leave_no_trace(label):
    ids, _ = batch(1)
    ids = torch.cat([ids[:, :9], ids[:, :9], ids[:, :4]], dim=1)
    model, drafted = own(label)
    tokens, accepted = blocks_of(model, drafted, ids, prompt_lookup_num_tokens=4)
    _, replay = own(label)
    replay.activate_past_recording()
    start = 0
    for size in accepted:
        logits = feed(model, replay, tokens[:, : start + size], start=start)
        start += size
        replay.crop(0)
        assert int(logits[0, -1].argmax()) == int(tokens[0, start])
    assert_same_state(drafted, replay, exact=False)


@pytest.mark.parametrize("label", DROPPING)
def test_beams_follow_their_own_history(label):
    model, cache = own(label)
    ids, _ = batch(1)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        length_penalty=0.0,
        **{CACHE: cache},
    )
    replay = feed(*own(label), out.sequences, blocks=[18] + [1] * 8)[:, :-1].log_softmax(-1)
    total = replay.gather(-1, out.sequences[:, 18:, None]).sum((1, 2))
    assert float((total - out.sequences_scores).abs().max()) < 1e-3


@pytest.mark.parametrize("case", ["llama", "gemma3/all"])
@over_own
def test_batch_operations_copies_reset_and_files(label, case, tmp_path):
    ids, mask = batch(3, more=12)
    model, cache = own(label, case)
    feed(model, cache, ids, mask, [18, 1, 1])
    rest = [1, 4, 1]
    expected = feed(model, copy.deepcopy(cache), ids, mask, rest, start=20)
    for name, index in {
        "reorder_cache": torch.tensor([2, 0, 0]),
        "batch_select_indices": torch.tensor([2, 1]),
        "batch_repeat_interleave": torch.tensor([0, 0, 1, 1, 2, 2]),
    }.items():
        other = copy.deepcopy(cache)
        getattr(other, name)(2 if name == "batch_repeat_interleave" else index)
        assert_close(feed(model, other, ids[index], mask[index], rest, start=20), expected[index])
    if not case.endswith("/all"):
        path = str(tmp_path / "cache.safetensors")
        cache.save(path)
        read = [own(label, case)[1].load(path)]
        if label != "keep":
            read.append(load(path, model))
        for other in read:
            assert other.sharing == cache.sharing
            assert_close(feed(model, other, ids, mask, rest, start=20), expected)
        with pytest.raises(ValueError, match="written by"):
            OWN[label](model).load(path)
    assert bool(cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    fresh = own(label, case)[1]
    ids = ids[:2].flip(1)
    assert torch.equal(*(feed(model, each, ids, blocks=[19, 1, 1, 1]) for each in (cache, fresh)))


def test_a_file_of_the_preset(tmp_path):
    ids, mask = batch(3, more=4)
    model, cache = shared("llama", sharing={3: 1})
    feed(model, cache, ids, mask, [18, 1])
    path = str(tmp_path / "cache.safetensors")
    cache.save(path)
    again = load(path, model)
    assert type(again) is CrossLayerSharedCache and again.sharing == {3: 1}
    assert torch.equal(*(feed(model, each, ids, mask, [1, 1], start=19) for each in (cache, again)))


@pytest.mark.parametrize("described", [7, "10", [[1]], [[[1], 0]], [[0, 1]], [[1, 0], [2, 1]], [["1", "0"]], [[9, 0]]])
def test_a_hostile_map_in_a_file(tmp_path, described):
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    model, cache = shared("llama")
    feed(model, cache, batch(1)[0])
    path = str(tmp_path / "cache.safetensors")
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()["hf_kvcache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    description["sharing"] = described
    save_file(tensors, path, metadata={"hf_kvcache": json.dumps(description)})
    with pytest.raises(ValueError):
        load(path, model)
    with pytest.raises(ValueError):
        shared("llama")[1].load(path)


# ---------------------------------------------------------------------- bytes and lengths


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", ["llama", "qwen2", "mistral/all", "gemma3/all", "gpt_oss/all"])
@over_own
def test_bytes_are_halved_exactly(label, case, rows):
    ids, mask = batch(rows, more=12)
    scope = {"scope": "all"} if case.endswith("/all") else {}
    plain = OWN[label](model_of(case), **scope)
    model, cache = own(label, case)
    expected = cache.expected_bytes(model.config, rows, 18)
    assert 2 * expected == plain.expected_bytes(model.config, rows, 18)
    start = 0
    for size in (18, 1, 1, 4, 1):
        stop = start + size
        for each in (plain, cache):
            feed(model, each, ids[:, :stop], mask[:, :stop], start=start)
        # With `adaptive_heads` the lengths of heads follow the attention, and with it padding of the tables.
        if label != "snapkv_adaptive":
            assert 2 * cache.nbytes == plain.nbytes
        assert cache.nbytes == sum(storages(cache, model).values())
        if stop == 18 and rows == 1:
            assert cache.nbytes == expected
        start = stop
    assert [cache.kept_length(i) for i in CASES[case]] == [cache.kept_length(i) for i in CASES[case].values()]
    assert all(cache.get_seq_length(i) == 25 for i in range(4))
    assert [type(layer) is FollowerLayer for layer in cache.layers] == [i in CASES[case] for i in range(4)]
    assert f"4 layers reading {4 - len(CASES[case])}" in repr(cache)


@pytest.mark.parametrize("label", CODED)
def test_bytes_are_halved_with_a_codec(label):
    model = model_of("llama")
    ids = torch.randint(2, 96, (2, 110))
    plain, cache = CODED[label](model), CODED[label](model, sharing=2)
    for each in (plain, cache):
        feed(model, each, ids, blocks=[100, 1, 1, 8])
    assert 2 * cache.nbytes == plain.nbytes == sum(storages(plain, model).values()) - _turns(plain, model)
    assert 2 * cache.expected_bytes(model.config, 2, 110) == plain.expected_bytes(model.config, 2, 110)
    assert cache.kv_layers[0].segments.has_packed


def _turns(cache, model):
    """Bytes of the rotations, which all caches have in common."""
    from hf_kvcache.codecs.base import turn_of

    common = {turn_of(8, seed).untyped_storage().data_ptr() for seed in (0, 1)}
    return sum(size for pointer, size in storages(cache, model).items() if pointer in common)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("label", CODED)
def test_followers_read_packed_rows(label, attention):
    """A follower over packed rows gives what it gives over the same rows read as tensors."""
    ids = torch.randint(2, 96, (2, 110))
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    together = feed(*own(label, "llama", attention), ids, mask, [100, 1, 1, 8])
    alone = feed(*own(label, "llama", attention), ids[1:, 30:], blocks=[70, 1, 1, 8])
    assert_close(together[1], alone[0])
    if label != "kivi":
        return
    # The same codec without attention of this library: everything is read as tensors.
    stock = stock_of("llama", attention)
    unattached = KVCache(stock.config, codec=KIVI(4, residual_length=8, num_sink_tokens=2), sharing=2)
    attached = feed(*own(label, "llama", attention), ids, blocks=[100, 1, 1, 8])
    assert_close(attached, feed(stock, unattached, ids, blocks=[100, 1, 1, 8]))


def test_a_step_ends_with_its_last_follower():
    """Nothing of a prompt is held back until the next step."""
    model, cache = own("snapkv")
    ids, _ = batch(1)
    feed(model, cache, ids)
    assert all(layer.pending is None and layer.segments.length == 10 for layer in cache.kv_layers)
    model, cache = own("h2o", "gemma3/all")
    feed(model, cache, ids, blocks=[16, 1, 1])
    assert all(layer.pending is None for layer in cache.kv_layers)


def test_sealed_prompts():
    model, cache = shared("llama")
    ids, mask = batch(3, more=8)
    expected = feed(*oracle("llama"), ids, mask, [18, 1, 1, 1, 5])
    feed(model, cache, ids[:, :18], mask[:, :18])
    cache.seal()
    for each in (copy.deepcopy(cache), cache):
        assert_close(feed(model, each, ids, mask, [1, 1, 1, 5], start=18), expected[:, 1:])
        assert all(layer.pending is None for layer in each.kv_layers)


# ---------------------------------------------------------------------- three parts at once


@pytest.mark.parametrize("attention", ATTENTION)
def test_sharing_kivi_and_a_sliding_window_hybrid(attention, tmp_path):
    """Gemma 3: full layers share and are packed, sliding ones share and stay exact; everything a user does with it."""
    model = model_of("gemma3", attention)
    codec = KIVI(4, residual_length=8, num_sink_tokens=2)

    def make(**parts: Any) -> KVCache:
        return CrossLayerSharedCache(model, codec=codec, scope="all", **parts)

    ids = torch.randint(2, 96, (3, 130))
    mask = torch.ones_like(ids)
    mask[1, :20], mask[2, :50] = 0, 0
    blocks = [90, 1, 1, 1, 20, 1, 8, 8]
    cache = make()
    assert cache.sharing == {2: 0, 3: 1}
    ours = feed(model, cache, ids, mask, blocks)
    assert cache.layers[1].segments.has_packed and not hasattr(cache.layers[0].segments, "has_packed")
    # Each row as if alone; exactly half of the bytes; near to the shared model in full precision.
    for row, pad in ((1, 20), (2, 50)):
        alone = feed(model, make(), ids[row : row + 1, pad:], blocks=[90 - pad, *blocks[1:]])
        assert_close(ours[row], alone[0])
    plain = KVCache(model, codec=codec, scope="all")
    feed(model, plain, ids, mask, blocks)
    assert 2 * cache.nbytes == plain.nbytes
    exact = feed(*oracle("gemma3/all", attention), ids, mask, blocks)
    assert_close(ours[:, 0], exact[:, 0])
    error = float((ours - exact).abs().mean())
    assert 0 < error < 0.25 * float((feed(model, plain, ids, mask, blocks) - exact).abs().mean())
    # Beams, drafts, two turns, files.
    prompt = ids[:1, :80]
    lookup = torch.cat([prompt, prompt[:, :20]], dim=1)
    plainly = generate(model, make(), lookup, max_new_tokens=24)
    assert torch.equal(generate(model, make(), lookup, max_new_tokens=24, prompt_lookup_num_tokens=4), plainly)
    assert generate(model, make(), prompt, num_beams=3).shape == (1, 88)
    path = str(tmp_path / "stack.safetensors")
    cache.save(path)
    more = torch.randint(2, 96, (3, 6))
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    expected = feed(model, cache, ids, mask, [4, 1, 1], start=130)
    assert torch.equal(feed(model, load(path, model), ids, mask, [4, 1, 1], start=130), expected)


# ---------------------------------------------------------------------- bad use


REFUSED: list[tuple[Any, str]] = [
    (0, "at least 2"),
    (1, "at least 2"),
    (True, "whole number"),
    (2.0, "whole number"),
    ("2", "whole number"),
    ([1, 0], "whole number"),
    ({}, "empty"),
    ({4: 0}, "layers 0 to 3"),
    ({"1": 0}, "layers 0 to 3"),
    ({1: -1}, "layers 0 to 3"),
    ({True: 0}, "layers 0 to 3"),
    ({1: 1}, "earlier ones"),
    ({0: 1}, "earlier ones"),
    ({1: 0, 2: 1}, "map both to that one"),
]


@pytest.mark.parametrize("sharing, message", REFUSED)
def test_impossible_maps(sharing, message):
    with pytest.raises(ValueError, match=message):
        KVCache(model_of("llama"), sharing=sharing)


def test_layers_that_differ_never_share():
    with pytest.raises(ValueError, match="differ in kind, window"):
        CrossLayerSharedCache(model_of("gemma3"), {1: 0}, scope="all")
    with pytest.raises(ValueError, match="scope='all'"):
        CrossLayerSharedCache(model_of("gemma3"), {2: 0})
    with pytest.raises(NotImplementedError, match="change nothing.*scope='all'"):
        CrossLayerSharedCache(model_of("mistral/all"))
    with pytest.raises(ValueError, match="not attached"):
        CrossLayerSharedCache(model_of("mistral/all").config, {1: 0}, scope="all")


def test_layers_without_rotation_do_not_share_with_rotated_ones():
    from hf_kvcache.compat.shrink import build

    model = build("smollm3")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.no_rope_layers = 4, [1, 1, 0, 0]
    config.layer_types = ["full_attention"] * 4
    assert CrossLayerSharedCache(config).sharing == {1: 0, 3: 2}
    with pytest.raises(ValueError, match="differ in kind"):
        CrossLayerSharedCache(config, {2: 1})


def test_models_that_cannot_share():
    from .common import model_of as two_layers

    with pytest.raises(NotImplementedError, match="latents.*MLA"):
        CrossLayerSharedCache(two_layers("deepseek_v3"))
    native = Gemma3nTextConfig(num_hidden_layers=6, num_kv_shared_layers=2, layer_types=["full_attention"] * 6)
    with pytest.raises(NotImplementedError, match="trained to read the keys and values of earlier ones"):
        CrossLayerSharedCache(native)
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        CrossLayerSharedCache(T5Config(num_layers=4))
    from hf_kvcache.compat.shrink import build

    with pytest.raises(NotImplementedError, match="recurrent state"):
        CrossLayerSharedCache(build("falcon_h1"))
    with pytest.raises(ValueError, match="needs `sharing`"):
        CrossLayerSharedCache(model_of("llama"), None)


def test_devices_of_a_group():
    check_devices({1: 0}, ["cpu", "cpu", "meta"])
    with pytest.raises(ValueError, match="layer 2 is on meta and layer 0 on cpu"):
        check_devices({2: 0}, ["cpu", "cpu", "meta"])


def test_a_follower_without_its_source():
    model, cache = shared("llama")
    keys = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="layer 1 shares.*layer 0.*reset"):
        cache.update(keys, keys, 1)
    cache.update(keys, keys, 0)
    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (3, 0), "as the model asks in the middle of a pass"
    assert cache.get_mask_sizes(3, 1) == (3, 0)
    with pytest.raises(ValueError, match="layer 1 shares.*reset"):
        cache.update(keys[:, :, :2], keys[:, :, :2], 1)
    cache.update(keys, keys, 1)
    assert cache.get_seq_length(1) == 3
    with pytest.raises(ValueError, match="layer 1 shares.*reset"):
        cache.update(keys, keys, 1)
    cache.reset()
    ids, _ = batch(1)
    assert_close(feed(model, cache, ids), feed(*oracle("llama"), ids))
