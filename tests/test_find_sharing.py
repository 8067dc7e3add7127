"""Searches for layers that can share: what they find, in which order, and files of it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.test_sharing import Oracle, _built
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcache import CrossLayerSharedCache, KVCache, Sharing, find_sharing
from hf_kvcache.attention import is_ours
from patches.cross_layer import shared_layers

TEXTS = [torch.randint(2, 96, (1, 24), generator=torch.Generator().manual_seed(n)) for n in range(3)]


def llama(layers: int = 6, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(5)
    sizes: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
    )
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def reference(model: Any, sharing: dict[int, int]) -> tuple[float, float]:
    """Divergence and cosine, over again, with transformers' cache."""
    kl = cosine = 0.0
    with torch.no_grad():
        for ids in TEXTS:
            full = model(ids, use_cache=False, output_hidden_states=True)
            cache = Oracle(model.config, sharing)
            got = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
            p, q = full.logits.double().softmax(-1), got.logits.double().softmax(-1)
            kl += float((p * (p.log() - q.log())).sum(-1).mean()) / len(TEXTS)
            pair = full.hidden_states[-1], got.hidden_states[-1]
            cosine += float(torch.cosine_similarity(*pair, dim=-1).mean()) / len(TEXTS)
    return kl, cosine


@pytest.mark.parametrize("method", ["kl", "kvsharer"])
def test_what_is_reported_is_what_the_shared_model_does(method):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    found = find_sharing(model, TEXTS, 2, method, min_cosine=-1, progress=False)
    assert len(found.map) == 2 and found.layers == 6 and found.method == method
    assert (found.texts, found.tokens) == (3, 24)
    kl, cosine = reference(model, found.map)
    assert abs(found.kl - kl) < 1e-5 and abs(found.cosine - cosine) < 1e-5
    assert not is_ours(model.config._attn_implementation), "the model is left as it came"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert KVCache(model, sharing=found).sharing == dict(sorted(found.map.items()))
    again = find_sharing(model, TEXTS, 2, method, min_cosine=-1, progress=False)
    assert again == found, "deterministic"
    fewer = find_sharing(model, TEXTS, 1, method, min_cosine=-1, progress=False)
    assert list(found.map.items())[:1] == list(fewer.map.items())


def test_kvsharer_tries_the_most_unlike_first():
    model = llama()
    found = find_sharing(model, TEXTS, 3, "kvsharer", min_cosine=-1, progress=False)
    caches = []
    for ids in TEXTS:
        caches.append(KVCache(model.config))
        with torch.no_grad():
            model(ids, past_key_values=caches[-1], use_cache=True)
    mean = [
        [sum(getattr(cache.layers[layer], name)[0] for cache in caches) / len(caches) for name in ("keys", "values")]
        for layer in range(6)
    ]
    distance = {
        (j, i): sum(float((a - b).pow(2).sum().sqrt()) for a, b in zip(mean[j], mean[i], strict=True))
        for j in range(6)
        for i in range(j)
    }
    expected: dict[int, int] = {}
    for follower, source in sorted(distance, key=lambda pair: -distance[pair]):
        taken = follower in expected or source in expected or follower in expected.values()
        if not taken and len(expected) < 3:
            expected[follower] = source
    assert list(found.map.items()) == list(expected.items())
    for follower, source, order, cosine in found.tried:
        assert abs(order - distance[int(follower), int(source)]) < 1e-3
        assert -1 <= cosine <= 1


def test_kvsharer_rejects_what_moves_the_last_state_too_far():
    model = llama()
    strict = find_sharing(model, TEXTS, 1, "kvsharer", min_cosine=-1, progress=False)
    cosine = strict.tried[0][3]
    found = find_sharing(model, TEXTS, 1, "kvsharer", min_cosine=cosine + 1e-6, progress=False)
    assert len(found.tried) > 1 and found.map != strict.map
    assert found.cosine > cosine
    with pytest.raises(ValueError, match="only 0 of 2 layers can share.*min_cosine"):
        find_sharing(model, TEXTS, 2, "kvsharer", min_cosine=1, progress=False)


def test_the_search_by_divergence_finds_the_layers_that_do_not_mind():
    """Two layers are made copies of the one before, with an attention that hardly adds anything: they can follow."""
    model = llama(8)
    with torch.no_grad():
        for layer in (3, 6):
            model.model.layers[layer].self_attn.o_proj.weight.mul_(1e-3)
    found = find_sharing(model, TEXTS, 2, "kl", sources=2, progress=False)
    assert set(found.map) == {3, 6}
    worse = find_sharing(model, TEXTS, 2, "kvsharer", min_cosine=-1, progress=False)
    assert found.kl < 0.01 < worse.kl


def test_the_search_is_bounded_and_ends():
    model = llama()
    found = find_sharing(model, TEXTS, 3, "kl", sources=2, tries=3, progress=False)
    assert len(found.tried) <= 5 * 2 + 3 * 3
    with pytest.raises(ValueError, match="only . of 5 layers can share, because no layer is left"):
        find_sharing(model, TEXTS, 5, "kl", sources=1, tries=1, progress=False)
    with pytest.raises(ValueError, match="at most 5 layers"):
        find_sharing(model, TEXTS, 6, "kl", progress=False)


def test_windowed_layers_and_hybrids():
    model = copy.deepcopy(_built("gemma3"))
    model.config._attn_implementation_internal = "sdpa"
    assert find_sharing(model, TEXTS, 1, progress=False).map == {3: 1}
    both = find_sharing(model, TEXTS, 2, scope="all", progress=False)
    assert sorted(both.map.items()) == [(2, 0), (3, 1)]
    assert not is_ours(model.config._attn_implementation)
    assert CrossLayerSharedCache(model, both, scope="all").sharing == {2: 0, 3: 1}
    with pytest.raises(ValueError, match="scope='all'"):
        CrossLayerSharedCache(model, both)


def test_text_needs_a_tokenizer():
    model = llama()

    class Tokenizer:
        def __call__(self, text: str) -> Any:
            return type("Ids", (), {"input_ids": [2 + ord(c) % 90 for c in text]})

    found = find_sharing(
        model, ["a text of some length", "another one, longer than the first"], 1, tokenizer=Tokenizer()
    )
    assert (found.texts, found.tokens) == (2, 21)
    assert find_sharing(model, "a text of some length", 1, tokens=10, tokenizer=Tokenizer()).tokens == 10


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(texts="text"), "tokenizer"),
    (dict(texts=[]), "empty"),
    (dict(texts=[torch.zeros(2, 20, dtype=torch.long)]), r"LongTensor \[1, T\]"),
    (dict(texts=[torch.zeros(1, 20)]), r"LongTensor \[1, T\]"),
    (dict(texts=TEXTS[0][:, :4]), "at least 8"),
    (dict(layers_to_share=0), "layers_to_share"),
    (dict(layers_to_share=0.3), "layers_to_share"),
    (dict(method="cosine"), "method.*kl, kvsharer"),
    (dict(tokens=4), "tokens"),
    (dict(min_cosine=2), "min_cosine"),
    (dict(sources=0), "sources"),
    (dict(tries=True), "tries"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_use(changes, message):
    arguments: dict[str, Any] = dict(texts=TEXTS, layers_to_share=1, progress=False) | changes
    with pytest.raises(ValueError, match=message):
        find_sharing(llama(), **arguments)


def test_bad_models():
    with pytest.raises(ValueError, match="model itself"):
        find_sharing(llama().config, TEXTS, 1)
    with pytest.raises(ValueError, match="eval"):
        find_sharing(llama().train(), TEXTS, 1)
    found = find_sharing(llama(), TEXTS, 1, progress=False)
    with pytest.raises(ValueError, match="found for another model"):
        KVCache(llama(4), sharing=found)


# ---------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def found() -> Sharing:
    return find_sharing(llama(), TEXTS, 2, progress=False)


def test_a_file_gives_the_same_back(found, tmp_path):
    path = str(tmp_path / "sharing.json")
    found.save(path)
    again = Sharing.load(path)
    assert again == found and list(again.map.items()) == list(found.map.items())
    assert [p.name for p in tmp_path.iterdir()] == ["sharing.json"]
    model = llama()
    assert KVCache(model, sharing=again).sharing == KVCache(model, sharing=found).sharing
    with shared_layers(model, again) as sharing:
        assert sharing == dict(sorted(found.map.items()))


HOSTILE: list[tuple[str, Any]] = [
    ("format_version", 2),
    ("format_version", True),
    ("map", {}),
    ("map", []),
    ("map", {"1": 0}),
    ("map", [[1, 0, 0]]),
    ("map", [[1, 1]]),
    ("map", [[0, 1]]),
    ("map", [[1, -1]]),
    ("map", [[6, 0]]),
    ("map", [["1", 0]]),
    ("map", [[True, 0]]),
    ("map", [[2, 1], [1, 0]]),
    ("map", [[1, 0], [1, 0]]),
    ("map", [[10**30, 0]]),
    ("layers", 10**9),
    ("layers", 1),
    ("layers", "6"),
    ("method", "exec"),
    ("method", ["kl"]),
    ("kl", -1),
    ("kl", "0"),
    ("kl", 10**400),
    ("cosine", 2),
    ("cosine", None),
    ("tried", {}),
    ("tried", [[1, 0, 0.1]]),
    ("tried", [[1, 0, 0.1, None]]),
    ("tried", [[9, 0, 0.1, 0.1]]),
    ("texts", 0),
    ("tokens", 1.5),
    ("signature", "llama"),
    ("signature", []),
    ("signature", [{"a": 1}]),
    ("extra", 1),
]


@pytest.mark.parametrize("field, value", HOSTILE)
def test_hostile_files(found, tmp_path, field, value):
    path = tmp_path / "sharing.json"
    found.save(str(path))
    content = json.loads(path.read_text())
    content[field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not a map of shared layers"):
        Sharing.load(str(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"kl": NaN}', "[" * 100_000, "\x00\xff", '{"format_version": 1}'], ids=range(8)
)
def test_files_that_are_something_else(tmp_path, text):
    path = tmp_path / "sharing.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="not a map of shared layers"):
        Sharing.load(str(path))


def test_files_that_are_too_large_or_lack_a_field(found, tmp_path):
    path = tmp_path / "sharing.json"
    path.write_bytes(b" " * 10_000_001)
    with pytest.raises(ValueError, match="larger than"):
        Sharing.load(str(path))
    found.save(str(path))
    content = json.loads(path.read_text())
    del content["signature"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lacks the fields.*signature"):
        Sharing.load(str(path))


# ---------------------------------------------------------------------- the example


def test_healing_brings_a_shared_model_nearer_to_the_unshared_one():
    pytest.importorskip("peft")
    from heal_shared import heal, perplexity

    model = llama(4)
    sharing = {1: 0, 3: 2}
    healed, undo, losses = heal(model, sharing, TEXTS, steps=25, rate=5e-3, rank=8)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    trained = {name for name, p in healed.named_parameters() if p.requires_grad}
    assert not any(
        f"layers.{layer}.self_attn.{kind}_proj" in name for name in trained for layer in sharing for kind in "kv"
    )
    assert any("layers.0.self_attn.k_proj" in name for name in trained)
    assert perplexity(healed, TEXTS, sharing) > 0
    undo()
    assert not any(hasattr(module, "_hf_kvcache_shares") for module in healed.modules())


@pytest.mark.slow
def test_the_example_runs(smollm2, tmp_path):
    """Two steps of it, as a user starts it."""
    pytest.importorskip("peft")
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(root / "examples" / "heal_shared.py"), "--sharing", "2", "--steps", "2"]
    command += ["--tokens", "32", "--save", str(tmp_path / "healed")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "15 of 30 layers share" in done.stdout and "after 2 steps" in done.stdout
    assert (tmp_path / "healed" / "adapter_model.safetensors").exists()
