"""Caches by name: what a spec builds, that its text comes back, and that an error points at the token."""

from __future__ import annotations

import pickle
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvcache
from hf_kvcache import (
    BlockPool,
    CacheSpec,
    HeavyHitterCache,
    KVCache,
    SlidingWindowCache,
    SnapKVCache,
    SpecError,
    from_spec,
    parse_spec,
)
from hf_kvcache.codecs import KIVI, PRESETS, Float8, Latent, Rotated
from hf_kvcache.sharing import Sharing
from hf_kvcache.specs import KINDS, Part, techniques


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=16, num_hidden_layers=4)
    torch.manual_seed(3)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    return LlamaForCausalLM(config).eval()


# ---------------------------------------------------------------------- what is built


def test_every_kind_is_built(model: LlamaForCausalLM) -> None:
    cache = from_spec(model, "kivi:nbits=4,residual_length=64+offload:resident_length=1024")
    assert type(cache) is KVCache and isinstance(cache.codec, KIVI)
    assert (cache.codec.nbits, cache.codec.residual_length, cache.offload.resident_length) == (4, 64, 1024)
    both = from_spec(model, "rotated-4-2:residual_length=32 + snapkv:max_capacity_prompt=0.5,window_size=8", 100)
    assert isinstance(both, SnapKVCache) and both.policy.max_capacity_prompt == 50
    assert isinstance(both.codec, Rotated) and (both.codec.key_bits, both.codec.value_bits) == (4, 2)
    assert both.codec.residual_length == 32
    assert isinstance(from_spec(model, "h2o:heavy_size=8,recent_size=8"), HeavyHitterCache)
    window = from_spec(model, "window:window_length=8+sharing:factor=2")
    assert isinstance(window, SlidingWindowCache) and window.sharing == {1: 0, 3: 2}
    assert from_spec(model, "sharing:map={3: 1}").sharing == {3: 1}
    assert from_spec(model, "sharing").sharing == {1: 0, 3: 2}
    paged = from_spec(model, "paged:block_size=16,max_bytes=1000000")
    assert isinstance(paged.pool, BlockPool) and (paged.pool.block_size, paged.pool.max_bytes) == (16, 1_000_000)
    assert isinstance(from_spec(model, "float8:q_group_size=32").codec, Float8)
    assert from_spec(model, "kv:scope=all").scope == "all"
    assert from_spec(model, parse_spec("kivi-2")).codec.nbits == 2


def test_two_builds_share_nothing(model: LlamaForCausalLM) -> None:
    spec = parse_spec("paged:block_size=16")
    assert spec.build(model).pool is not spec.build(model).pool


def test_a_config_is_enough_where_no_policy_needs_the_model(model: LlamaForCausalLM) -> None:
    assert from_spec(model.config, "rotated-4").codec is not None
    with pytest.raises(ValueError, match="needs the model itself"):
        from_spec(model.config, "window:window_length=8")


def test_a_sharing_can_come_from_a_file(model: LlamaForCausalLM, tmp_path: Path) -> None:
    from hf_kvcache.sharing.result import plain_signature

    signature = plain_signature(model.config)
    path = tmp_path / "shared layers+more.json"
    Sharing({2: 0}, 4, "kl", 0.1, 0.9, [], 1, 8, signature).save(str(path))
    spec = parse_spec(f"sharing:file={str(path)!r}")
    assert spec.build(model).sharing == {2: 0} and parse_spec(str(spec)) == spec
    with pytest.raises(SpecError, match="`file` cannot be read"):
        from_spec(model, "sharing:file=nowhere.json")


@torch.no_grad()
def test_what_is_built_generates(model: LlamaForCausalLM) -> None:
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    want = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for spec in ("kv", "paged:block_size=8", "offload:resident_length=8,page=8", "kivi-8"):
        cache = from_spec(model, spec)
        assert torch.equal(
            model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False, pad_token_id=0), want
        )
    packed = from_spec(model, "rotated-4:residual_length=0+offload:resident_length=4,page=32+sharing:factor=2")
    model.generate(ids, past_key_values=packed, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert packed.get_seq_length() == 45


@pytest.mark.parametrize(
    ("spec", "lossless"),
    [
        ("kv", True),
        ("paged", True),
        ("offload", True),
        ("offload:top_pages=0.5", False),
        ("kivi-8", False),
        ("sharing", False),
        ("window:window_length=4", False),
    ],
)
def test_lossless(spec: str, lossless: bool) -> None:
    assert parse_spec(spec).lossless is lossless


# ---------------------------------------------------------------------- the Python that it stands for


@pytest.mark.parametrize(
    "text",
    [
        "kv",
        "rotated-4",
        "rotated-4:residual_length=64",
        "kivi:nbits=[4, 4, 2, 2],num_sink_tokens=4",
        "float8:q_group_size=32+window:window_length=200",
        "snapkv:max_capacity_prompt=0.5,pooling=maxpool+rotated:nbits=3",
        "h2o:heavy_size=16,recent_size=16,scope=full",
        "kivi-4+offload:resident_length=64+sharing:factor=2",
        "sharing:map={1: 0}+paged:block_size=16",
    ],
)
def test_the_python_builds_the_same(model: LlamaForCausalLM, text: str) -> None:
    code = parse_spec(text).python(400)
    scope: dict[str, Any] = {"model": model}
    exec(code, scope)
    got, want = scope["cache"], from_spec(model, text, 400)
    assert type(got) is type(want) and got.arguments() == want.arguments() and got.sharing == want.sharing
    assert (got.codec and got.codec.describe()) == (want.codec and want.codec.describe())
    assert got.offload == want.offload and (got.pool is None) == (want.pool is None)
    assert code.splitlines()[-1].startswith("cache = ") and all(x.startswith("from ") for x in code.splitlines()[:-1])


# ---------------------------------------------------------------------- the text comes back


def test_the_canonical_text() -> None:
    assert str(parse_spec(" offload : resident_length=8 + kivi: residual_length = 64 ,nbits=4 + kv")) == (
        "kivi:nbits=4,residual_length=64+offload:resident_length=8"
    )
    assert str(parse_spec("kv+kv:scope=all".partition("+")[2])) == "kv:scope=all"
    assert str(parse_spec("kv")) == str(parse_spec("kv:")) == "kv"
    assert parse_spec("kivi:nbits=4,residual_length=8") == parse_spec("kivi:residual_length=8,nbits=4")
    assert len({parse_spec("kivi-4"), parse_spec("kv+kivi-4"), parse_spec("kivi-2")}) == 2
    assert parse_spec("kivi-4") != parse_spec("kivi-4:num_sink_tokens=4") and parse_spec("kivi-4") != "kivi-4"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.text(alphabet=string.ascii_letters + string.digits + "+,:=[]{}()'\"\\ ._-/~\n", max_size=12)
    | st.sampled_from(["1e5", "007", "None", "True", "1-2j", "a+b", "'", "1_000", "0x1F", "nan", "-", "..."]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def specs(draw: Any) -> CacheSpec:
    parts = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True)):
        technique = draw(st.sampled_from([t for t in techniques().values() if t.kind == kind]))
        names = technique.arguments
        chosen = draw(st.lists(st.sampled_from(sorted(names)), unique=True)) if names else []
        chosen += [name for name, required in names.items() if required and name not in chosen]
        parts.append(Part(technique.name, {name: draw(values) for name in chosen}))
    return CacheSpec(tuple(parts))


@given(specs())
@settings(max_examples=300, deadline=None)
def test_any_spec_round_trips(spec: CacheSpec) -> None:
    text = str(spec)
    again = parse_spec(text)
    assert again == spec and str(again) == text and hash(again) == hash(spec)
    for part in spec.parts:
        found = again.part(part.technique.kind)
        if found is None:
            assert part.name == "kv" and not part.arguments
            continue
        assert found.name == part.name and found.arguments == dict(part.arguments)
        assert all(type(found.arguments[k]) is type(v) for k, v in part.arguments.items())


@given(st.text(alphabet="kv kivi-4 snapkv:+,=[](){}'\"\\12.5nbits_\n\t", max_size=40) | st.text(max_size=40))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_pointed_at(text: str) -> None:
    try:
        spec = parse_spec(text)
    except SpecError as error:
        lines = str(error).split("\n")
        assert len(lines[-2]) == 2 + len(text) and 0 <= error.start <= error.stop <= len(text)
        assert lines[-1] == "  " + " " * error.start + "^" * max(1, error.stop - error.start)
    else:
        assert parse_spec(str(spec)) == spec


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("spec", "token", "words"),
    [
        ("kivi:nbit=4+offload", "nbit", "takes no argument 'nbit'.*did you mean 'nbits'"),
        ("rotated-4+ofload", "ofload", "unknown cache 'ofload'. Did you mean 'offload'"),
        ("kivi:nbits=4,+offload", "", "name=value between the commas"),
        ("kivi:nbits=4,nbits=2", "nbits", "'nbits' is given twice"),
        ("kv+kivi:nbits", "nbits", "expected name=value, got 'nbits'"),
        ("kv+kivi:nbits= ", "", "has no value after the ="),
        ("kivi:nbits=[4,2+offload", "[", "the bracket \\[ is never closed"),
        ("offload:disk='/tmp", "'", "the quote ' is never closed"),
        ("kivi:nbits=4]+kv", "]", "closes nothing"),
        ("snapkv+window:window_length=4", "window:window_length=4", "two policies, snapkv and window"),
        ("kivi-4+rotated-4", "rotated-4", "two codecs, kivi-4 and rotated-4"),
        ("offload+paged+offload", "offload", "two offloads"),
        ("kv + window + kivi", "window", "window needs window_length"),
        ("kv++kivi", "", "unknown cache ''"),
        ("kivi:nbits=1e999", "1e999", "must be finite"),
        ("kivi:nbits={1, 2}", "{1, 2}", "must be a number, a text, a list or a map, got set"),
        ("kivi:nbits=b'4'", "b'4'", "got bytes"),
    ],
)
def test_errors_of_reading_point_at_the_token(spec: str, token: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse_spec(spec)
    assert caught.value.token == token and caught.value.text == spec
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("spec", "token", "words"),
    [
        ("kv+kivi:residual_length=8,nbits=5", "nbits=5", "`nbits` must be one of"),
        ("kivi-4+offload:resident_length=-1", "resident_length=-1", "`resident_length` must be a positive"),
        ("offload:host_bytes=5", "host_bytes=5", "`host_bytes` needs `disk`"),
        ("snapkv:max_capacity_prompt=0.25", "max_capacity_prompt=0.25", "say how long that is \\(`prompt_tokens`\\)"),
        ("window:window_length=1.5", "window_length=1.5", "above 0 and at most 1.0"),
        ("kv:scope=some", "scope=some", "`scope` must be 'full' or 'all'"),
        ("sharing:factor=2,map={1: 0}", "map={1: 0}", "say the same thing twice"),
        ("sharing:map=5", "map=5", "must be a map of layers"),
        ("paged:block_size=0", "block_size=0", "`block_size`"),
        ("rotated:levels=odd", "levels=odd", "`levels` must be"),
        ("kivi:nbits=four", "nbits=four", "`nbits` must be one of"),
    ],
)
def test_errors_of_values_point_at_the_argument(spec: str, token: str, words: str) -> None:
    parsed = parse_spec(spec)
    with pytest.raises(SpecError, match=words) as caught:
        parsed.check()
    assert caught.value.token == token


def test_what_no_model_takes_is_refused_by_the_cache(model: LlamaForCausalLM) -> None:
    with pytest.raises(NotImplementedError, match="a block of a pool holds rows in full precision"):
        from_spec(model, "kivi-4+paged")
    with pytest.raises(NotImplementedError, match="gives the place of single rows"):
        from_spec(model, "h2o+kivi-4")
    with pytest.raises(ValueError, match="this model has none"):
        from_spec(model, "latent-4")
    with pytest.raises(ValueError, match="layer 9"):
        from_spec(model, "sharing:map={9: 0}")


def test_hostile_texts_are_only_read() -> None:
    for text in ("kivi:nbits=__import__('os').system('true')", "kivi:nbits=" + "[" * 5000 + "]" * 4900, "kv" * 9000):
        with pytest.raises(ValueError):
            parse_spec(text).check()
    with pytest.raises(ValueError, match="a spec is a text"):
        parse_spec(None)  # type: ignore[arg-type]


def test_parts_made_in_code_are_checked() -> None:
    spec = CacheSpec((Part("kivi", {"nbits": 4}),))
    assert str(spec) == "kivi:nbits=4"
    with pytest.raises(ValueError, match="unknown cache 'kv2'"):
        Part("kv2")
    with pytest.raises(ValueError, match="takes no argument 'x'"):
        Part("kivi", {"x": 1})
    with pytest.raises(ValueError, match="must be a number, a text"):
        Part("kivi", {"nbits": object()})
    with pytest.raises(ValueError, match="at least one technique"):
        CacheSpec(())
    with pytest.raises(ValueError, match="two codecs"):
        CacheSpec((Part("kivi"), Part("rotated-4")))
    with pytest.raises(SpecError, match="`nbits` must be one of") as caught:
        CacheSpec((Part("kivi", {"nbits": 5}),)).check()
    assert caught.value.token == "kivi:nbits=5"


def test_every_preset_and_class_has_a_name() -> None:
    known = techniques()
    assert set(PRESETS) <= set(known)
    assert {known[name].make for name in ("kivi", "rotated", "float8", "latent")} == {KIVI, Rotated, Float8, Latent}
    assert known["offload"].make is hf_kvcache.Offload and known["paged"].make is BlockPool
    # Every argument of the caches' own classes can be typed.
    for name, cache in (("snapkv", SnapKVCache), ("h2o", HeavyHitterCache), ("window", SlidingWindowCache)):
        import inspect

        own = set(inspect.signature(cache).parameters) - {"model", "parts"}
        assert own == set(known[name].arguments), name
