"""Calibration: the measurement, the allotment, the file."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.common import CACHE, VOCABULARY, model_of
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvcache import KVCache, attach
from hf_kvcache.attention import is_ours
from hf_kvcache.calibration import Calibration, allot, calibrate
from hf_kvcache.codecs import KIVI, Codec, Float8, LayerCodec, Rotated

LAYERS, QUIET = 4, 1
PROMPT = 128
SHORT: dict[str, Any] = dict(prompt_length=PROMPT, progress=False, residual_length=16)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small to be worth sharing out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Any:
    """Four layers, of which one hardly matters."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[QUIET].self_attn.o_proj.weight.mul_(1e-3)
    return model


def windows(count: int = 2, tokens: int = PROMPT + 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (1, tokens), generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def measured(model: Any) -> Calibration:
    return calibrate(model, windows(), 3.0, **SHORT)


# ---------------------------------------------------------------------- measuring


def test_what_it_finds(measured: Calibration, model: Any) -> None:
    assert measured.widths == [2, 3, 4] and measured.codec_name == "Rotated"
    assert len(measured.key_bits) == len(measured.value_bits) == LAYERS
    assert measured.codec_arguments["residual_length"] == 16 and "key_bits" not in measured.codec_arguments
    for index, layer in enumerate(measured.sensitivities):
        assert layer is not None
        # What the quiet layer adds is lost in rounding.
        assert index == QUIET or all(row[0] > row[1] > row[2] > 0 for row in layer)
    measured.check(model)
    measured.check(model.config)


def test_an_insensitive_layer_gets_fewer_bits(measured: Calibration) -> None:
    table = [[layer[part][0] for layer in measured.sensitivities if layer is not None] for part in range(2)]
    for nats in table:
        assert nats[QUIET] < 0.01 * min(x for i, x in enumerate(nats) if i != QUIET)
    for target in (3.25, 3.5, 3.75):
        found = measured.at(target)
        assert found.key_bits[QUIET] == found.value_bits[QUIET] == 2
    everything = [2 if layer == QUIET else 4 for layer in range(LAYERS)]
    found = measured.at(4.0)  # just enough for all the others
    assert found.key_bits == found.value_bits == everything


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = model.config._attn_implementation
    model.train()
    model.lm_head.eval()
    calibrate(model, windows(1), 3.0, **SHORT)
    assert model.training and model.model.training and not model.lm_head.training
    assert model.config._attn_implementation == before and not is_ours(before)
    model.eval()


def test_deterministic(model: Any, measured: Calibration, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(model, windows(), 3.0, **SHORT | {"progress": True}) == measured
    assert capsys.readouterr().out == ""


def test_an_attached_model(model: Any, measured: Calibration) -> None:
    model = attach(copy.deepcopy(model))
    found = calibrate(model, windows(), 3.0, **SHORT)
    assert is_ours(model.config._attn_implementation)
    assert torch.allclose(torch.tensor(found.sensitivities), torch.tensor(measured.sensitivities), atol=1e-6)


class OneLayer(Codec):
    """Rotated, but all layers except one are exact, and its values have 8 bits."""

    def __init__(self, layer: int, bits: int) -> None:
        super().__init__(16, 4)
        self.layer, self.inner = layer, Rotated(key_bits=bits, value_bits=8, residual_length=16)

    @property
    def per_token(self) -> bool:
        return True

    def for_layer(self, layer: int, layers: int, key_dim: int, value_dim: int) -> LayerCodec:
        made = self.inner.for_layer(layer, layers, key_dim, value_dim)
        return made if layer == self.layer else replace(made, residual_length=10**6)


@torch.no_grad()
def test_sensitivities_are_those_of_a_cache(model: Any, measured: Calibration) -> None:
    model = copy.deepcopy(model)
    for layer in (0, 3):
        found = 0.0
        for ids in windows():
            full = DynamicCache(config=model.config)
            model(ids[:, :PROMPT], **{CACHE: full})
            cache = KVCache(model, codec=OneLayer(layer, 2))
            for mine, theirs in zip(cache.layers, full.layers, strict=True):
                mine.update(theirs.keys, theirs.values)
                mine.settle()
            want = model(ids[:, PROMPT:], **{CACHE: full}).logits[0].double().log_softmax(-1)
            got = model(ids[:, PROMPT:], **{CACHE: cache}).logits[0].double().log_softmax(-1)
            found += (want.exp() * (want - got)).sum(-1).mean().item() / 2
        row = measured.sensitivities[layer]
        assert row is not None
        assert found == pytest.approx(row[0][0], rel=0.05)


@pytest.mark.parametrize("codec", [Rotated, KIVI, "KIVI"])
def test_the_codec_works_and_has_its_bits(model: Any, codec: Any) -> None:
    model = copy.deepcopy(model)
    target = 3.3 if codec is Rotated else 4.6
    calibration = calibrate(model, windows(1), target, codec, **SHORT)
    cache = KVCache(model, codec=calibration.codec())
    ids = windows(1)[0]
    model.generate(ids, max_new_tokens=20, do_sample=False, **{CACHE: cache})
    stores = [layer.segments for layer in cache.kv_layers]
    assert all(store.has_packed for store in stores)
    bits = [store.codec.bits_per_element(*store.shape[2:]) for store in stores]
    assert sum(bits) / len(bits) == pytest.approx(calibration.bits)
    assert calibration.bits <= target
    assert calibration.codec(residual_length=64).residual_length == 64
    with pytest.raises(ValueError, match="key_bits"):
        calibration.codec(key_bits=4)


def test_layers_without_a_codec() -> None:
    model = model_of("gemma3")
    found = calibrate(model, windows(1, 104), 3.9, widths=[3, 2], prompt_length=96, residual_length=16, progress=False)
    assert [layer is None for layer in found.sensitivities] == [True, False, True]
    assert found.key_bits[::2] == found.value_bits[::2] == [3, 3] and found.bits <= 3.9
    KVCache(model, codec=found.codec())


@pytest.mark.parametrize("case,dtype", [("llama", "bf16"), ("deepseek_v3", "fp32")])
def test_other_dtypes_and_latent_caches(case: str, dtype: str) -> None:
    found = calibrate(
        model_of(case, dtype=dtype), windows(1), 4.2, codec="Rotated", widths=(2, 4), scale_bits=8, **SHORT
    )
    assert 2 < found.bits <= 4.2 and math.isfinite(found.predicted_kl)


def test_text(model: Any, measured: Calibration) -> None:
    ids = [window[0].tolist() for window in windows(2, PROMPT + 100)]

    class Tokenizer:
        def __call__(self, text: str) -> Any:
            class Encoding:
                input_ids = ids[int(text)]

            return Encoding

    by_text = calibrate(model, ["0", "1"], 3.0, tokenizer=Tokenizer(), **SHORT)
    by_ids = calibrate(model, torch.tensor(ids)[:, : PROMPT + 64], 3.0, **SHORT)
    assert by_text == by_ids


# ---------------------------------------------------------------------- allotting


def table_of(seed: int, layers: int, widths: int, convex: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    drops = torch.rand(layers, 2, widths, generator=generator)
    if convex:
        drops = drops.sort(-1, descending=True).values
    return (drops.sum(-1, keepdim=True) - drops.cumsum(-1) + 0.01).tolist()


def costs_of(layers: int, widths: Any) -> Any:
    return [[[width / 2 + 0.06 for width in widths]] * 2 for _ in range(layers)]


@pytest.mark.parametrize("seed", range(6))
def test_greedy_is_best(seed: int) -> None:
    widths = (2, 3, 4)
    nats, costs = table_of(seed, 3, 3), costs_of(3, widths)
    for target in (2.12, 2.4, 2.8, 3.1, 3.5, 4.12):
        found = allot(nats, costs, widths, target)
        best = min(
            sum(nats[i // 2][i % 2][at] for i, at in enumerate(choice))
            for choice in itertools.product(range(3), repeat=6)
            if sum(costs[i // 2][i % 2][at] for i, at in enumerate(choice)) / 3 <= target + 1e-9
        )
        assert found["predicted_kl"] == pytest.approx(best)


@pytest.mark.parametrize("convex", [True, False])
@pytest.mark.parametrize("widths", [(2, 3, 4), (2, 4, 8)])
def test_budget(convex: bool, widths: tuple[int, ...]) -> None:
    layers = 5
    for seed in range(10):
        nats, costs = table_of(seed, layers, 3, convex), costs_of(layers, widths)
        before = math.inf
        for step in range(60):
            target = 2.12 + (widths[-1] - 2) * step / 59
            found = allot(nats, costs, widths, target)
            assert found["bits"] <= target + 1e-9
            largest = max(b - a for a, b in zip(widths, widths[1:], strict=False)) / 2 / layers
            assert found["bits"] > target - largest - 1e-9
            assert found["predicted_kl"] <= before + 1e-12
            before = found["predicted_kl"]
        assert found["key_bits"] == found["value_bits"] == [widths[-1]] * layers


def test_noise_is_not_believed() -> None:
    found = allot([[[0.2, 0.3, 0.1], [0.5, 0.01, 0.02]]], costs_of(1, (2, 3, 4)), (2, 3, 4), 2.7)
    assert (found["key_bits"], found["value_bits"]) == ([2], [3])
    found = allot([[[0.2, 0.3, 0.1], [0.5, 0.01, 0.02]]], costs_of(1, (2, 3, 4)), (2, 3, 4), 3.7)
    assert (found["key_bits"], found["value_bits"]) == ([4], [3])
    assert found["predicted_kl"] == pytest.approx(0.11)


def test_more_bits_are_never_predicted_worse(measured: Calibration) -> None:
    found = [measured.at(2.5 + step / 10) for step in range(21)]
    assert all(a.predicted_kl >= b.predicted_kl for a, b in zip(found, found[1:], strict=False))
    assert all(c.target_bits - 0.125 - 1e-9 <= c.bits <= c.target_bits + 1e-9 for c in found)
    assert measured.at(3.0) == measured


# ---------------------------------------------------------------------- bad use


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(target_bits=2.4), "between 2.5 and 4.5"),
        (dict(target_bits=4.6), "between 2.5 and 4.5"),
        (dict(target_bits=math.nan), "target_bits"),
        (dict(target_bits="3"), "target_bits"),
        (dict(widths=(2,)), "two widths"),
        (dict(widths=(2, 5)), "widths"),
        (dict(widths=(2, 2)), "each once"),
        (dict(widths=3), "widths"),
        (dict(codec=Float8), "Rotated, KIVI"),
        (dict(codec="int4"), "Rotated, KIVI"),
        (dict(codec=None), "Rotated, KIVI"),
        (dict(nbits=4), "widths"),
        (dict(levels="other"), "levels"),
        (dict(prompt_length=51), "at least 52"),
        (dict(prompt_length=145), "window 0 has 152 tokens"),
        (dict(input_ids=[]), "empty"),
        (dict(input_ids="a text"), "tokenizer"),
        (dict(input_ids=torch.zeros(1, 200)), "LongTensor"),
        (dict(input_ids=torch.zeros(200, dtype=torch.long)), "LongTensor"),
    ],
)
def test_refusals(model: Any, change: dict[str, Any], words: str) -> None:
    arguments = dict(input_ids=windows(1), target_bits=3.0) | SHORT | change
    with pytest.raises(ValueError, match=words):
        calibrate(model, **arguments)


def test_refused_models(model: Any, measured: Calibration) -> None:
    with pytest.raises(ValueError, match="config"):
        calibrate(model.config, windows(1), 3.0, **SHORT)
    with pytest.raises(NotImplementedError, match="no full-attention layer"):
        calibrate(model_of("mistral"), windows(1), 3.0, **SHORT)
    with pytest.raises(ValueError, match="another model"):
        measured.check(model_of("llama"))
    with pytest.raises(ValueError, match="out of reach"):
        measured.at(5)


# ---------------------------------------------------------------------- files


def test_round_trip(measured: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "bits.json"
    measured.save(path)
    assert Calibration.load(path) == measured
    assert [file.name for file in tmp_path.iterdir()] == ["bits.json"]
    assert Calibration.load(str(path)).codec().describe() == measured.codec().describe()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        measured.save(tmp_path / "no" / "bits.json")
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.json")


def test_round_trip_with_layers_left_out(tmp_path: Path) -> None:
    rows = [[0.3, 0.1], [0.2, 0.0]]
    cost = [[1.0, 2.0], [1.0, 2.0]]
    found = allot([None, rows], [None, cost], [2, 4], 3.0)
    made = Calibration(
        target_bits=3.0,
        codec_name="KIVI",
        codec_arguments={},
        widths=[2, 4],
        sensitivities=[None, rows],
        costs=[None, cost],
        signature=["llama", 1, None, [1, 2]],
        **found,
    )
    made.save(tmp_path / "bits.json")
    assert Calibration.load(tmp_path / "bits.json") == made
    assert (made.key_bits, made.value_bits, made.bits) == ([4, 2], [4, 4], 3.0)


def _set(*path: Any) -> Any:
    *keys, last, value = path

    def change(content: Any) -> None:
        for key in keys:
            content = content[key]
        content[last] = value

    return change


@pytest.mark.parametrize(
    "change,words",
    [
        (_set("format_version", 2), "format version"),
        (_set("format_version", True), "format version"),
        (_set("more", 1), "unknown ones"),
        (lambda content: content.pop("bits"), "lacks"),
        (_set("widths", [2, 3, 5]), "widths"),
        (_set("widths", [4, 3, 2]), "ascending"),
        (_set("widths", "234"), "widths"),
        (_set("key_bits", 0, 8), "key_bits"),
        (_set("key_bits", 0, 2.0), "key_bits"),
        (_set("key_bits", 0, True), "key_bits"),
        (_set("key_bits", {}), "key_bits"),
        (_set("key_bits", []), "key_bits"),
        (_set("value_bits", [2, 2]), "value_bits"),
        (_set("sensitivities", 0, 0, 0, -1), "sensitivities"),
        (_set("sensitivities", 0, 0, 0, "0.1"), "sensitivities"),
        (_set("sensitivities", 0, 0, 0, 10**400), "sensitivities"),
        (_set("sensitivities", 0, 0, 0, math.nan), "finite"),
        (_set("sensitivities", 0, 0, 0, math.inf), "finite"),
        (_set("sensitivities", 0, 0, [0.1]), "3 numbers"),
        (_set("sensitivities", 0, [[1, 2, 3]]), "pair"),
        (_set("sensitivities", []), "4 layers"),
        (_set("sensitivities", 0, None), "only one"),
        (_set("sensitivities", 0, 0, 0, 50.0), None),  # of a width that was not chosen: nothing depends on it
        (_set("costs", 0, 0, [2, 1, 0]), "grow"),
        (_set("costs", 0, 0, [0, 0, 0]), "grow"),
        (_set("bits", 2.6), "bits"),
        (_set("target_bits", 2.5), "exceed"),
        (_set("predicted_kl", 0.0), "predicted_kl"),
        (_set("codec_name", "Float8"), "unknown codec"),
        (_set("codec_name", ["Rotated"]), "codec_name"),
        (_set("codec_arguments", {"nbits": 2}), "codec_arguments"),
        (_set("codec_arguments", {"residual_length": -1}), "residual_length"),
        (_set("codec_arguments", {"residual_length": "16"}), "residual_length"),
        (_set("codec_arguments", {"residual_length": 16.0}), "whole numbers"),
        (_set("codec_arguments", {"levels": []}), "whole numbers"),
        (_set("codec_arguments", {"other": 1}), "other"),
        (_set("codec_arguments", []), "codec_arguments"),
        (_set("signature", "llama"), "signature"),
        (_set("signature", [{}]), "signature"),
    ],
)
def test_tampered_files(measured: Calibration, tmp_path: Path, change: Any, words: str | None) -> None:
    path = tmp_path / "bits.json"
    measured.save(path)
    content = json.loads(path.read_text())
    assert content["key_bits"][0] > 2
    change(content)
    path.write_text(json.dumps(content))
    if words is None:
        Calibration.load(path)
        return
    with pytest.raises(ValueError, match=words) as caught:
        Calibration.load(path)
    assert "bits.json" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[]", b"null", b"{", b'{"format_version": 1}', b"[" * 100_000, b" " * 10_000_001]
)
def test_files_that_are_no_calibration(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bits.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="bits.json"):
        Calibration.load(path)
