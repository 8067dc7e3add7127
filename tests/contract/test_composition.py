"""Policy x codec x offload x pool x sharing x prefix: every pair works as its parts say, or refuses with the reason.

Offload, pools and prefixes lose nothing, so whatever they are put together with must give what it gives without them.
Sharing, policies and codecs change the result; together they are held against the parts that are roomy enough to lose
nothing, and against themselves: a padded row alone, beams, and a second turn.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel

from hf_kvcache import BlockPool, KVCache, Offload, PrefixStore
from hf_kvcache.codecs import KIVI, Rotated
from hf_kvcache.policies import HeavyHitter, SlidingWindow, SnapKV

from .common import assert_close, feed, positions_of

PROMPT, PREFIX, STEPS = 150, 110, 40

# axis -> label -> argument of KVCache, made anew for each cache. The first of an axis loses nothing.
AXES: dict[str, dict[str, Any]] = {
    "policy": {
        "window": lambda: SlidingWindow(window_length=80, num_sink_tokens=2),
        "snapkv": lambda: SnapKV(max_capacity_prompt=100, window_size=8, kernel_size=3),
        "adaptive": lambda: SnapKV(max_capacity_prompt=100, window_size=8, kernel_size=3, adaptive_heads=True),
        "h2o": lambda: HeavyHitter(heavy_size=50, recent_size=50),
    },
    "codec": {
        "kivi": lambda: KIVI(nbits=4, residual_length=32, num_sink_tokens=2),
        "rotated": lambda: Rotated(nbits=4, residual_length=32, num_sink_tokens=2),
    },
    "offload": {
        "fetch": lambda: Offload(resident_length=48, page=16, attend="fetch"),
        "compute": lambda: Offload(resident_length=48, page=16, attend="compute"),
    },
    "pool": {"pool": lambda: BlockPool(block_size=16)},
    "sharing": {"pairs": lambda: 2},
    "prefix": {"prefix": lambda: None},
}
AXIS = {label: axis for axis, labels in AXES.items() for label in labels}
NEUTRAL = ("offload", "pool", "prefix")
ROOMY: dict[str, Any] = {
    "window": lambda: SlidingWindow(window_length=900, num_sink_tokens=2),
    "snapkv": lambda: SnapKV(max_capacity_prompt=900, window_size=8, kernel_size=3),
    "adaptive": lambda: SnapKV(max_capacity_prompt=900, window_size=8, kernel_size=3, adaptive_heads=True),
    "h2o": lambda: HeavyHitter(heavy_size=450, recent_size=450),
    "kivi": lambda: KIVI(nbits=4, residual_length=900),
    "rotated": lambda: Rotated(nbits=4, residual_length=900),
}
# Pairs that cannot work, and what the refusal must name.
REFUSED = {
    frozenset(pair.split("+")): reason
    for reason, pairs in {
        "drops tokens, and which ones depends on the text": "window+prefix snapkv+prefix adaptive+prefix h2o+prefix",
        "changes which rows are held at every step": "window+fetch window+compute h2o+fetch h2o+compute",
        "gives each head a length of its own": (
            "adaptive+kivi adaptive+rotated adaptive+fetch adaptive+compute adaptive+pool"
        ),
        "writes keys in groups of tokens": "h2o+kivi",
        "gives a place of each head to a new row": "h2o+pool",
        "holds rows in full precision": "kivi+pool rotated+pool",
        "stay on the device": "fetch+pool compute+pool",
        "belong to one cache": "fetch+prefix compute+prefix",
        "shared by copies of the cache": "pool+prefix",
    }.items()
    for pair in pairs.split()
}

PAIRS = [pair for pair in itertools.combinations(AXIS, 2) if AXIS[pair[0]] != AXIS[pair[1]]]


@functools.cache
def model_of(attention: str = "sdpa", hybrid: bool = False) -> PreTrainedModel:
    torch.manual_seed(5)
    sizes: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        max_position_embeddings=1024,
    )
    if hybrid:
        kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
        config: Any = Gemma3TextConfig(**sizes, layer_types=kinds, sliding_window=40)
    else:
        config = LlamaConfig(**sizes)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.generation_config.pad_token_id = 0
    return model


def cache_of(labels: tuple[str, ...], model: PreTrainedModel, roomy: tuple[str, ...] = ()) -> KVCache:
    parts = {AXIS[label]: (ROOMY if label in roomy else AXES[AXIS[label]])[label]() for label in labels}
    if "prefix" not in parts:
        return KVCache(model, **parts)
    parts.pop("prefix")
    return PrefixStore(max_bytes=1 << 30, cache=lambda inner: KVCache(inner, **parts)).new_cache(model)


def ids_of(rows: int) -> torch.Tensor:
    """Rows that begin with the same `PREFIX` tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 96, (rows, PROMPT + STEPS), generator=generator)
    ids[:, :PREFIX] = ids[:1, :PREFIX]
    return ids


def run(labels: tuple[str, ...], model: PreTrainedModel, padded: bool, roomy: tuple[str, ...] = ()) -> torch.Tensor:
    """Logits over a prefix, the rest of a prompt, single tokens, a rollback, and a second turn."""
    ids = ids_of(2)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :37] = 0
        ids = ids.masked_fill(mask == 0, 0)
    blocks = [PROMPT - PREFIX, *[1] * 12, 5, *[1] * 3]
    if "prefix" in labels:
        parts = {AXIS[label]: AXES[AXIS[label]][label] for label in labels if label != "prefix"}
        store = PrefixStore(
            max_bytes=1 << 30, cache=lambda inner: KVCache(inner, **{axis: make() for axis, make in parts.items()})
        )
        store.warm(model, ids[0, :PREFIX])
        cache = store.get(model, ids)
        assert cache.get_seq_length() == PREFIX
    else:
        cache = cache_of(labels, model, roomy)
        feed(model, cache, ids, mask, [PREFIX])
    end = PREFIX + sum(blocks)
    first = feed(model, cache, ids, mask, blocks, start=PREFIX)
    if any(label in ("window", "h2o") for label in labels):  # they drop at every step, so nothing can be undone
        first = torch.cat([first, first[:, -2:]], dim=1)
        second = feed(model, cache, ids, mask, [1] * 4, start=end)
    else:
        cache.crop(-2)
        second = feed(model, cache, ids, mask, [1] * 6, start=end - 2)
    third = feed(model, cache, ids, mask, [ids.shape[1] - end - 4], start=end + 4)
    return torch.cat([first, second, third], dim=1)


@functools.cache
def expected(labels: tuple[str, ...], attention: str, padded: bool, roomy: tuple[str, ...] = ()) -> torch.Tensor:
    return run(labels, model_of(attention), padded, roomy)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair(pair: tuple[str, str], attention: str) -> None:
    model = model_of(attention)
    reason = REFUSED.get(frozenset(pair))
    if reason is not None:
        with pytest.raises((ValueError, NotImplementedError), match=reason):
            cache_of(pair, model)
        return
    left = tuple(label for label in pair if AXIS[label] not in NEUTRAL)
    padded = "prefix" not in pair
    if len(left) < 2:
        assert_close(run(pair, model, padded), expected(left, attention, padded))
        return
    # What is roomy loses nothing, whichever of the two it is (sharing always loses).
    for label in left:
        if label in ("kivi", "rotated") and ("window" in left or "h2o" in left):
            continue  # a codec with room for all that such a policy holds would pack nothing, and refuses
        if label in ROOMY:
            others = tuple(other for other in left if other != label)
            assert_close(run(left, model, padded, roomy=(label,)), expected(others, attention, padded))
    together = run(left, model, padded)
    assert torch.isfinite(together).all()
    if "adaptive" not in pair:  # budgets over heads differ with the batch's longest row
        ids = ids_of(2)[1:, 37:]
        alone = cache_of(left, model)
        blocks = [PREFIX - 37, PROMPT - PREFIX, *[1] * 12, 5, *[1] * 3]
        assert_close(together[1:, :17], feed(model, alone, ids, None, blocks)[:, 1:])


def _beams(model: PreTrainedModel, cache: KVCache, ids: torch.Tensor) -> torch.Tensor:
    kwargs: dict[str, Any] = dict(num_beams=3, max_new_tokens=40, do_sample=False)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **kwargs)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "prefix" not in pair], ids="+".join)
def test_beams_over_a_pair(pair: tuple[str, str]) -> None:
    if frozenset(pair) in REFUSED:
        pytest.skip("refused")
    model = model_of()
    left = tuple(label for label in pair if AXIS[label] not in NEUTRAL)
    ids = ids_of(2)[:, :PROMPT]
    tokens = _beams(model, cache_of(pair, model), ids)
    if len(left) < 2:
        assert torch.equal(tokens, _beams(model, cache_of(left, model), ids))
    else:
        assert torch.equal(tokens[:1], _beams(model, cache_of(left, model), ids[:1]))


def test_snapkv_with_4_bits_in_host_memory() -> None:
    for attention, mode in itertools.product(("sdpa", "eager"), ("fetch", "compute")):
        model = model_of(attention)
        assert_close(run(("snapkv", "kivi", mode), model, True), expected(("snapkv", "kivi"), attention, True))
        cache = cache_of(("snapkv", "kivi", mode), model)
        feed(model, cache, ids_of(2), None, [PROMPT, *[1] * 40])
        tiers = cache.nbytes_by_tier()
        assert tiers["host"] > 0 and sum(tiers.values()) == cache.nbytes
    model = model_of()
    ids = ids_of(2)[:, :PROMPT]
    ours = _beams(model, cache_of(("snapkv", "kivi", "fetch"), model), ids)
    assert torch.equal(ours, _beams(model, cache_of(("snapkv", "kivi"), model), ids))


@pytest.mark.parametrize("codec", ["kivi", "rotated"])
def test_a_prefix_of_4_bits_under_beams(codec: str) -> None:
    model = model_of()
    ids = ids_of(1)[:, :PROMPT]
    store = PrefixStore(max_bytes=1 << 30, cache=lambda inner: KVCache(inner, codec=AXES["codec"][codec]()))
    store.warm(model, ids[0, :PREFIX])
    held = store.nbytes
    tokens = store.generate(model, ids, num_beams=3, max_new_tokens=40, do_sample=False)
    plain = cache_of((codec,), model)
    feed(model, plain, ids, None, [PREFIX])
    plain.batch_repeat_interleave(3)
    assert torch.equal(tokens, _beams(model, plain, ids))
    assert store.stats()["hits"] >= 1 and held > 0


def test_shared_layers_with_kivi_and_sliding_windows() -> None:
    """On a hybrid model: pairs of full layers, and of sliding ones, share packed rows."""
    for attention in ("sdpa", "eager"):
        model = model_of(attention, hybrid=True)

        def make(codec: Any) -> KVCache:
            return KVCache(model, codec=codec, sharing=2, scope="all")  # noqa: B023

        ids = ids_of(2)
        mask = torch.ones_like(ids)
        mask[1, :37] = 0
        blocks = [PROMPT, *[1] * STEPS]
        exact = feed(model, make(None), ids, mask, blocks)
        assert_close(feed(model, make(ROOMY["kivi"]()), ids, mask, blocks), exact)
        cache = make(AXES["codec"]["kivi"]())
        packed = feed(model, cache, ids, mask, blocks)
        alone = feed(model, make(AXES["codec"]["kivi"]()), ids[1:, 37:], None, [PROMPT - 37, *[1] * STEPS])
        assert_close(packed[1:], alone)
        assert 0 < float((packed - exact).abs().max())
        assert len(cache.kv_layers) == 2
        assert positions_of(mask).shape == mask.shape
