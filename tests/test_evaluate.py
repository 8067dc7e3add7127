"""The fidelity harness: specs, figures against a recomputation of their own, and the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kvcache import HeavyHitterCache, KVCache, SnapKVCache, attach, detach
from hf_kvcache import codecs as codecs_package
from hf_kvcache.__main__ import main
from hf_kvcache.attention import is_ours
from hf_kvcache.codecs import KIVI, Float8, Rotated
from hf_kvcache.evaluate import TEXTS, evaluate, measure, needles, plot, report
from hf_kvcache.evaluate.texts import read
from hf_kvcache.specs import from_spec, parse_spec

PROMPT, TOKENS = 96, 8
# Little is exact, so that most of the prompt is packed.
SMALL = "residual_length=16,q_group_size=16"
KIVI8, KIVI2 = f"kivi:nbits=8,{SMALL}", f"kivi:nbits=2,{SMALL}"
SIZES: dict[str, Any] = dict(prompt=PROMPT, tokens=TOKENS, windows=2)


class Bytes:
    """A tokenizer: the bytes of the text."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def prose(characters: int) -> str:
    """Text that does not repeat: numbers in words."""
    digits = "zero one two three four five six seven eight nine".split()
    found = "".join(" ".join(digits[int(d)] for d in str(n * n + 17)) + ". " for n in range(characters // 20))
    return found[:characters]


TEXT = prose(60_000)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """With tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    sizes = dict(vocab_size=256, hidden_size=32, intermediate_size=48, head_dim=16, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(3)
    # Weights drawn wide, so that predictions are far from uniform.
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512, initializer_range=0.2)).eval()


@pytest.fixture(scope="module")
def result(model: LlamaForCausalLM) -> dict[str, Any]:
    specs = ["kv", KIVI8, KIVI2, "snapkv:max_capacity_prompt=0.5", f"snapkv:max_capacity_prompt=0.5+{KIVI2}"]
    return evaluate(model, Bytes(), {"prose": TEXT, "other": TEXT[::-1]}, specs, **SIZES)


# ---------------------------------------------------------------------- specs


def test_specs_build_what_they_say(model: LlamaForCausalLM) -> None:
    assert from_spec(model, "kv", 100).codec is None
    both = from_spec(model, "snapkv:max_capacity_prompt=0.5,window_size=8+kivi:nbits=[4, 2],num_sink_tokens=4", 100)
    assert isinstance(both, SnapKVCache) and both.policy.max_capacity_prompt == 50
    assert isinstance(both.codec, KIVI) and both.codec.nbits == [4, 2] and both.codec.num_sink_tokens == 4
    swapped = from_spec(model, "rotated:nbits=3,key_bits=4 + window:window_length=200", 100)
    assert isinstance(swapped.codec, Rotated) and swapped.codec.key_bits == 4 and swapped.policy.window_length == 200
    assert isinstance(from_spec(model, "h2o:heavy_size=0.25,recent_size=10", 100), HeavyHitterCache)
    assert isinstance(from_spec(model, "float8", 100).codec, Float8)
    assert from_spec(model, "kv:scope=all", 100).scope == "all"
    assert type(from_spec(model, "kv+kivi:residual_length=0.5", 100)) is KVCache


def test_presets_are_specs(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(num_sink_tokens: int = 2) -> KIVI:
        return KIVI(2, num_sink_tokens=num_sink_tokens)

    monkeypatch.setattr(codecs_package, "PRESETS", {"small": small}, raising=False)
    assert from_spec(model, "small", 100).codec.num_sink_tokens == 2
    assert from_spec(model, "kv+small:num_sink_tokens=4", 100).codec.num_sink_tokens == 4
    with pytest.raises(ValueError, match="codecs: .*small"):
        parse_spec("nothing")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nope", r"unknown cache 'nope'.*kv, snapkv, h2o, window.*rotated-4.*kivi-2"),
        ("", "unknown cache ''"),
        ("kivi:bits=4", "kivi takes no argument 'bits'; it takes nbits"),
        ("kivi:nbits", "expected name=value, got 'nbits'"),
        ("kivi:nbits=4,nbits=2", "'nbits' is given twice"),
        ("kivi:nbits=5", "kivi:nbits=5: `nbits` must be one of"),
        ("window", "window needs window_length: window:window_length=..."),
        ("snapkv:max_capacity_prompt=1.5", "share of the prompt, which is above 0 and at most 1.0"),
        ("snapkv:max_capacity_prompt=16", "must be larger than `window_size"),
        ("snapkv+h2o", "names two policies, snapkv and h2o"),
        ("kivi+float8", "names two codecs, kivi and float8"),
        ("kv:scope=some", "`scope` must be 'full' or 'all'"),
    ],
)
def test_bad_specs_are_refused_without_a_model(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_spec(spec).check(100)


# ---------------------------------------------------------------------- figures


def test_the_identity_is_exact_and_coarser_is_worse(result: dict[str, Any]) -> None:
    identity, fine, coarse, half, both = result["caches"]
    assert identity["kl"] < 1e-6 and identity["top1"] == 1
    assert identity["perplexity"] == pytest.approx(result["full"]["perplexity"], rel=1e-5)
    assert 1e-6 < fine["kl"] < coarse["kl"]
    assert identity["bits_per_element"] == 32 and identity["rows_kept"] == 1
    assert fine["bits_per_element"] == 10 and coarse["bits_per_element"] == 4
    assert half["rows_kept"] == 0.5 and half["bits_per_element"] == 16
    assert both["row_bits"] == 4 and both["bits_per_element"] == 2
    # So short a prompt is mostly slack.
    assert coarse["bytes_at_end"] < fine["bytes_at_end"] < identity["bytes_at_end"]


@torch.no_grad()
def test_figures_equal_a_recomputation(model: LlamaForCausalLM, result: dict[str, Any]) -> None:
    detach(model)
    kl, same, nll, full_nll, held = [], [], [], [], []
    for start in (5_000, 35_000):
        ids = torch.tensor([list(TEXT[start : start + PROMPT + TOKENS + 1].encode())])
        want = model(ids, use_cache=False).logits[0].double().log_softmax(-1)[PROMPT:-1]
        cache = KVCache(model, codec=KIVI(2, q_group_size=16, residual_length=16))
        model(ids[:, :PROMPT], past_key_values=cache)
        held.append(cache.nbytes / (2 * 2 * 2 * 16 * 4 * PROMPT))
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1] for i in range(PROMPT, PROMPT + TOKENS)]
        got = torch.stack(steps).double().log_softmax(-1)
        kl += torch.nn.functional.kl_div(got, want, reduction="none", log_target=True).sum(-1).tolist()
        same += (want.argmax(-1) == got.argmax(-1)).tolist()
        for logs, losses in ((got, nll), (want, full_nll)):
            losses += (-logs.gather(1, ids[0, PROMPT + 1 :, None])).flatten().tolist()
        detach(model)
    found = result["caches"][2]["by_text"]["prose"]
    count = 2 * TOKENS
    assert len(kl) == len(nll) == count
    assert found["kl"] == pytest.approx(sum(kl) / count, rel=1e-3)
    assert found["top1"] == sum(same) / count
    assert found["perplexity"] == pytest.approx(math.exp(sum(nll) / count), rel=1e-4)
    assert result["full"]["by_text"]["prose"]["perplexity"] == pytest.approx(math.exp(sum(full_nll) / count), rel=1e-4)
    assert found["bytes_after_prompt"] == pytest.approx(sum(held) / 2, rel=1e-9)


def test_means_are_of_windows(result: dict[str, Any]) -> None:
    cache = result["caches"][2]
    places = [(window["text"], window["window"]) for window in cache["windows"]]
    assert places == [("prose", 0), ("prose", 1), ("other", 0), ("other", 1)]
    assert cache["kl"] == pytest.approx(sum(window["kl"] for window in cache["windows"]) / 4)
    assert cache["by_text"]["other"]["kl"] == pytest.approx(sum(w["kl"] for w in cache["windows"][2:]) / 2)


def test_the_result_is_json_of_known_form(result: dict[str, Any]) -> None:
    again = json.loads(json.dumps(result))
    assert again == result
    assert set(again) == {"versions", "arguments", "model", "full", "caches", "needles"}
    assert set(again["versions"]) == {"python", "torch", "transformers"}
    assert again["arguments"]["texts"] == ["prose", "other"] and again["arguments"]["prompt"] == PROMPT
    assert again["model"]["dtype"] == "float32" and again["model"]["attention"] == "sdpa"
    means = {"kl", "top1", "perplexity", "bytes_after_prompt", "bytes_at_end"}
    means |= {"rows_kept", "row_bits", "bits_per_element"}
    for cache in again["caches"]:
        assert set(cache) == means | {"spec", "found", "by_text", "windows"}
        assert cache["found"] is None
        assert all(set(figures) == means for figures in cache["by_text"].values())
        assert all(set(w) == means - {"perplexity"} | {"text", "window", "nll"} for w in cache["windows"])
    assert again["full"]["windows"][0]["bytes_after_prompt"] == 2 * 2 * 2 * 16 * 4 * PROMPT


def test_two_runs_are_equal_and_a_shared_prompt_changes_nothing(model: LlamaForCausalLM) -> None:
    specs = [KIVI2, "rotated:nbits=3,residual_length=16+window:window_length=0.5", "rotated:residual_length=16"]
    first, second, shared = (
        evaluate(model, Bytes(), {"prose": TEXT}, specs, **SIZES, shared_prompt=flag) for flag in (False, False, True)
    )
    assert first == second
    assert shared["caches"] == first["caches"] and shared["full"] == first["full"]


def test_the_model_is_left_as_it_came(model: LlamaForCausalLM) -> None:
    sizes = SIZES | dict(tokens=1, windows=1)
    for prepare, attached in ((attach, True), (detach, False)):
        prepare(model)
        model.train(attached)
        evaluate(model, Bytes(), {"prose": TEXT}, ["kv"], **sizes)
        assert model.training is attached
        assert is_ours(model.config._attn_implementation) is attached
    assert not model.training


def test_caches_may_be_functions(model: LlamaForCausalLM) -> None:
    found = evaluate(model, Bytes(), {"prose": TEXT}, {"mine": lambda m: KVCache(m, codec=KIVI(2))}, **SIZES)
    # The default exact window is longer than this prompt.
    assert found["caches"][0]["spec"] == "mine" and found["caches"][0]["row_bits"] == 32


# ---------------------------------------------------------------------- needles


def test_needles_are_planted_between_sentences() -> None:
    tokenizer, codes = Bytes(), set()
    for index in range(10):
        needle = needles.make_needle(tokenizer, TEXT, index, 10, 400)
        text = tokenizer.decode(needle.ids[0].tolist())
        assert needle.ids.shape == (1, 400)
        found = re.search(r"\. The secret pass code of (\w+) is (\d{5})\.", text.replace(". .", "."))
        assert found is not None and found[2] == needle.code
        assert text.endswith(f"\n\nThe secret pass code of {found[1]} is")
        assert text[-needle.distance :].startswith(" The secret pass code")
        assert needle.depth == needles.DEPTHS[index // 2]
        codes.add(needle.code)
    assert len(codes) == 10


def test_a_tokenizer_that_opens_texts_opens_prompts() -> None:
    class Opening(Bytes):
        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            return SimpleNamespace(input_ids=[1] * add_special_tokens + list(text.encode()))

    needle = needles.make_needle(Opening(), TEXT, 0, 1, 400)
    assert needle.ids.shape == (1, 400) and needle.ids[0, 0] == 1 and (needle.ids == 1).sum() == 1


def test_codes_count_where_the_full_cache_finds_them(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def finds(model: Any, tokenizer: Any, needle: needles.Needle, cache: Any) -> bool:
        asked.append(type(cache))
        return needle.depth < 0.5 and getattr(cache, "codec", None) is None

    monkeypatch.setattr(measure, "_finds", finds)
    sizes = SIZES | dict(tokens=1, windows=1, needles=5)
    found = evaluate(model, Bytes(), {"prose": TEXT}, ["kv", "kivi"], **sizes)
    assert found["full"]["found"] == 2
    assert [cache["found"] for cache in found["caches"]] == [2, 0]
    assert asked.count(DynamicCache) == 5 and len(asked) == 5 + 2 * 2
    assert [code["full"] for code in found["needles"]] == [True, True, False, False, False]
    assert found["needles"][0]["caches"] == [True, False]
    assert report.rows(found)[1][-1] == "2/2" and "finds 2 of 5 codes" in report.headline(found)


def test_an_answer_is_the_greedy_continuation(model: LlamaForCausalLM) -> None:
    class Knowing(Bytes):
        def decode(self, ids: list[int]) -> str:
            text = super().decode(ids)
            return text + " ".join(map(needles.code_of, range(2))) if len(ids) == needles.ANSWER_TOKENS else text

    sizes = SIZES | dict(tokens=1, windows=1, needles=2)
    found = evaluate(model, Knowing(), {"prose": TEXT}, ["kv"], **sizes)
    assert found["full"]["found"] == found["caches"][0]["found"] == 2


# ---------------------------------------------------------------------- errors


def test_short_texts_are_refused_with_the_numbers(model: LlamaForCausalLM) -> None:
    with pytest.raises(
        ValueError, match="'prose' is too short: window 2 starts at character 35,000 of 35,050 and has 50 "
    ):
        evaluate(model, Bytes(), {"prose": TEXT[:35_050]}, ["kv"], **SIZES)
    with pytest.raises(ValueError, match="window 1 .* of 12 and has 0 tokens, but 105 are needed"):
        evaluate(model, Bytes(), {"prose": TEXT[:12]}, ["kv"], **SIZES)
    with pytest.raises(
        ValueError, match="text 'prose': needles in prompts of 1,000 tokens need .* 32,000 .* has 30,000"
    ):
        short = {"prose": TEXT[:30_000]}
        evaluate(model, Bytes(), short, ["kv"], prompt=1000, tokens=1, windows=1, needles=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(prompt=0), "`prompt` must be a whole number, at least 1, got 0"),
        (dict(tokens=1.5), "`tokens` must be a whole number"),
        (dict(needles=-1), "`needles` must be a whole number, at least 0"),
        (dict(caches=[]), "`caches` is empty"),
        (dict(caches="kv"), "`caches` must be a list of specs"),
        (dict(caches=["kv", "kv"]), "'kv' is named twice"),
        (dict(texts={}), "`texts` is empty"),
    ],
)
def test_bad_arguments(model: LlamaForCausalLM, change: dict[str, Any], words: str) -> None:
    arguments = dict(texts={"prose": TEXT}, caches=["kv"]) | SIZES | change
    with pytest.raises(ValueError, match=words):
        evaluate(model, Bytes(), **arguments)


def test_what_does_not_fit_is_named_before_measuring(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_forward", lambda *_: pytest.fail("the model was run"))
    with pytest.raises(NotImplementedError, match="^h2o\\+kivi: "):
        evaluate(model, Bytes(), {"prose": TEXT}, ["kv", "h2o+kivi"], **SIZES)


# ---------------------------------------------------------------------- output


def test_tables(result: dict[str, Any]) -> None:
    table = report.rows(result)
    assert table[0] == ["cache", "bits/element", "KL", "KL prose", "KL other", "perplexity", "top-1", "bytes"]
    assert table[1][:5] == ["kv", "32.00", "0", "0", "0"]
    lines = report.markdown(table).splitlines()
    assert lines[2].startswith("| `kv` | 32.00 | 0 |") and len({line.count("|") for line in lines}) == 1
    assert len({len(line) for line in report.plain(table).splitlines()}) == 1


def test_the_front_is_what_nothing_beats() -> None:
    points = [(4.0, 0.1), (2.0, 0.5), (4.0, 0.05), (8.0, 0.05), (3.0, 0.6), (9.0, 0.01)]
    assert plot.front(points) == [1, 2, 5]


@pytest.mark.parametrize("x", list(plot.X_AXES))
def test_a_plot_is_a_png(result: dict[str, Any], tmp_path: Path, x: str) -> None:
    pytest.importorskip("matplotlib")
    plot.pareto(result, tmp_path / "pareto.png", x)
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_the_extra_is_named(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'hf-kvcache\[eval\]'"):
        plot.pareto(result, "unused.png")


def test_texts() -> None:
    for name in TEXTS:
        assert len(read(name)) > 5_000 + 30_000 * 3 + 20_000
    with pytest.raises(ValueError, match="'no such file' is neither .* nor one of topics, docstrings"):
        read("no such file")


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and a byte-level tokenizer on disk, and a text."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    detach(model)
    model.save_pretrained(path)
    (path / "text.txt").write_text(TEXT, encoding="utf-8")
    return path


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "eval",
        "--model",
        str(folder),
        "--text",
        str(folder / "text.txt"),
        "--caches",
        "kv",
        KIVI2,
        "--windows",
        "1",
    ]
    words += ["--prompt", str(PROMPT), "--tokens", "4", "--needles", "1", "--json", str(tmp_path / "out.json")]
    assert main([*words, "--markdown"]) == 0
    output = capsys.readouterr()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["caches"][0]["kl"] < 1e-6 < found["caches"][1]["kl"]
    assert f"| `{KIVI2}` | 4.00 |" in output.out and "| --- |" in output.out
    assert "text.txt 1: kv" in output.err and "kv" not in output.out.splitlines()[0]
    assert main(words) == 0
    assert "| --- |" not in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text()) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--caches", "nope"], "unknown cache 'nope'. There are policies: kv, "),
        (["--caches", "kivi:nbits=5"], "`nbits` must be one of"),
        (["--text", "no such file"], "neither a text that can be read"),
        (["--json", "no/such/folder.json"], "no/such is no folder"),
        (["--threads", "0"], "--threads must be at least 1"),
    ],
)
def test_the_command_refuses_before_it_loads(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_kvcache.cli.evaluate.load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--model", "none", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_names_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--model", str(tmp_path)])
    assert caught.value.code == 2
    assert f"{tmp_path} cannot be loaded" in capsys.readouterr().err
