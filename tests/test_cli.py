"""The command: every subcommand, its errors of one line, and what Ctrl-C leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
import typer
import typer.main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_kvcache import detach, from_spec
from hf_kvcache.__main__ import main
from hf_kvcache.bench import decode
from hf_kvcache.cli import chat as chat_module
from hf_kvcache.cli import common
from hf_kvcache.cli.common import Several
from hf_kvcache.compat import run as compat_run
from hf_kvcache.evaluate import measure
from hf_kvcache.evaluate.measure import cache_argument
from hf_kvcache.sizing import recommend as rules

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("estimate", "recommend", "bench", "chat", "eval", "compat")
SMALL = "rotated-4:residual_length=16"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}~\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save_model(path: Path, template: str | None = None) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    sizes = dict(vocab_size=256, hidden_size=32, intermediate_size=48, head_dim=16, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2, eos_token_id=None, pad_token_id=0))
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="~")
    fast.chat_template = template
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("chatty"), TEMPLATE))


def ask(*words: str) -> int:
    return main(list(words))


def fails(capsys: pytest.CaptureFixture[str], *words: str, lines: int = 1) -> str:
    """The error of a command that must end with 2, one line long (a spec's shows the spec and points at the token)."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and len(text.rstrip("\n").split("\n")) == lines and "Traceback" not in text
    return text


# ---------------------------------------------------------------------- the command itself


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"hf-kvcache {command}" in text.split("Options:")[0].split("\n\n", 1)[1], "no example"
    for line in text.split("Options:")[1].splitlines():
        words = line.split()
        if words and words[0].startswith("--") and words[0] != "--help":
            assert len(words) > 2, f"{words[0]} is not explained"


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--help") == 0
    text = capsys.readouterr().out
    assert (
        all(f"\n  {command} " in text for command in COMMANDS)
        and "--debug" in text
        and "..." not in text.split("Commands:")[1]
    )
    assert ask("--version") == 0 and capsys.readouterr().out.strip() == "0.1.0"
    with pytest.raises(SystemExit) as caught:
        ask()
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "error: name a command" in captured.err and "Commands:" in captured.out


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(missing: str) -> None:
    code = f"""
import importlib.machinery, sys
finder = importlib.machinery.PathFinder
real = finder.find_spec
finder.find_spec = lambda name, *more: None if name.partition(".")[0] == {missing!r} else real(name, *more)
from hf_kvcache.__main__ import main
sys.exit(main(["--help"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr == f'error: the commands need {missing}: pip install "hf-kvcache[cli]"\n'


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_kvcache", "estimate", "--nope"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2 and "No such option: --nope" in done.stderr and "Traceback" not in done.stderr


def test_tracebacks_are_for_debug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no config" in fails(capsys, "estimate", str(ROOT))
    for words in (["--debug", "estimate", str(ROOT)], ["estimate", str(ROOT), "--debug"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2 and "Traceback" in capsys.readouterr().err

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("hf_kvcache.cli.estimate.measure_sizes", broken)
    assert ask("estimate", "llama-3-8b") == 1
    text = capsys.readouterr().err
    assert text.startswith("error: unexpected KeyError: 'a bug'; --debug") and text.count("\n") == 1
    assert ask("estimate", "llama-3-8b", "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_options_take_several_words() -> None:
    import typer

    app = typer.Typer()
    seen: dict[str, Any] = {}

    @app.command(cls=Several)
    def only(
        name: str,
        caches: Annotated[list[str] | None, typer.Option()] = None,
        sizes: Annotated[list[int] | None, typer.Option()] = None,
        flag: Annotated[bool, typer.Option("--flag")] = False,
    ) -> None:
        seen.update(name=name, caches=caches, sizes=sizes, flag=flag)

    def parsed(*words: str) -> dict[str, Any]:
        typer.main.get_command(app).main(args=list(words), standalone_mode=False)
        return seen

    want = dict(name="m", caches=["a", "b+c", "d"], sizes=[1, 2], flag=True)
    assert parsed("m", "--caches", "a", "b+c", "d", "--sizes", "1", "2", "--flag") == want
    assert parsed("m", "--flag", "--caches", "a", "--caches", "b+c", "d", "--sizes", "1", "--sizes", "2") == want
    assert parsed("--caches", "a", "b+c", "d", "--sizes", "1", "2", "--flag", "--", "m") == want
    assert parsed("m", "--caches=a", "b+c", "d", "--sizes=1", "2", "--flag") == want


@pytest.mark.parametrize(
    ("words", "message", "lines"),
    [
        (["frobnicate"], "No such command 'frobnicate'", 1),
        (["estimate"], "Missing argument", 1),
        (["estimate", "llama-3-8b", "--context", "many"], "'--context': Input should be a valid integer", 1),
        (["estimate", "llama-3-8b", "--context", "0"], "`context` must be at least 1", 1),
        (["estimate", "llama-3-8b", "--batch", "-3"], "`batch` must be at least 1", 1),
        (["estimate", "llama-3-8b", "--gpu-memory", "80XB"], "write it as 80GB", 1),
        (["estimate", "llama-3-8b", "--dtype", "int3"], "unknown dtype 'int3': one of bf16", 1),
        (["estimate", "llama-3-8b", "--caches", "kv", "kivi:nbit=4"], "did you mean 'nbits'", 3),
        (["estimate", "llama-3-8b", "--caches", "latent-4"], "this model has none", 1),
        (["estimate", "llama-3-8b", "--json", "no/such/x.json"], "no/such is no folder", 1),
        (["estimate", "llama-3-8b", "--plot", "no/such/x.png"], "no/such is no folder", 1),
        (["estimate", "llama-3-8b", "--plot", "x.xyz"], "x.xyz must end in .png", 1),
        (["estimate", "llama-3-8b", "--json", "."], "is a folder: name a file in it", 1),
        (["estimate", "llama-3-8b", "--weight-bits", "0"], "--weight-bits must be a number above 0", 1),
        (["estimate", "llama-3-8b", "--weight-bits", "nan"], "--weight-bits must be a number above 0", 1),
        (["estimate", "llama-3-8b", "--gpu-memory", "80"], "give the unit, as 80GB", 1),
        (["recommend", "llama-3-8b", "--context", "100"], "Missing option", 1),
        (["recommend", "llama-3-8b", "--gpu-memory", "8GB", "--context", "100"], "the weights alone take 16.1 GB", 1),
        (["recommend", "llama-3-8b", "--gpu-memory", "16.1GB", "--context", "99999"], "nothing fits: the smallest", 1),
        (
            ["recommend", "llama-3-8b", "--gpu-memory", "24GB", "--context", "9", "--lossless", "--max-kl", "1"],
            "exclude each other",
            1,
        ),
        (["recommend", "llama-3-8b", "--gpu-memory", "24GB", "--context", "9", "--max-kl", "0"], "must be above 0", 1),
        (
            ["recommend", "llama-3-8b", "--gpu-memory", "24GB", "--context", "9", "--max-kl", "nan"],
            "above 0, got nan",
            1,
        ),
        (["recommend", "llama-3-8b", "--gpu-memory", "18GB", "--context", "65536"], "a preset has no weights", 1),
        (
            ["recommend", "llama-3-8b", "--gpu-memory", "18GB", "--context", "65536", "--prompt", "40"],
            "--prompt 40 is too short for snapkv:max_capacity_prompt=0.5+rotated-4, one of the default caches",
            1,
        ),
        (["recommend", "llama-3-8b", "--gpu-memory", "24GB", "--context", "0"], "--context must be at least 1", 1),
        (["recommend", "llama-3-8b", "--gpu-memory", "24GB", "--context", "99", "--caches", "kv2"], "unknown cache", 3),
        (
            ["recommend", "llama-3-8b", "--gpu-memory", "24GB", "--context", "99", "--measurements", "nowhere.json"],
            "nowhere.json holds no measurements",
            1,
        ),
        (
            ["recommend", "llama-3-8b", "--gpu-memory", "24GB", "--context", "99", "--text", "no file"],
            "neither a text",
            1,
        ),
        (["bench", "no/model", "--caches", "kv", "nope"], "unknown cache 'nope'", 3),
        (["bench", "no/model", "--contexts", "100", "--caches", "window:window_length=2.0"], "share of the prompt", 3),
        (["bench", "no/model", "--contexts", "40", "4096"], "--contexts 40 is too short for snapkv", 1),
        (["bench", "LLaMA-3-8B"], "a preset has no weights", 1),
        (["bench", "no/model", "--device", "warp"], "--device warp: torch knows no such device", 1),
        (["bench", "no/model", "--plot", "tests"], "tests is a folder: name a file in it", 1),
        (["bench", "no/model", "--text", "no file"], "neither a text that can be read", 1),
        (["bench", "no/model", "--threads", "0"], "--threads must be at least 1", 1),
        (["bench", "no/model", "--json", "no/such/x.json"], "no/such is no folder", 1),
        (["chat", "no/model", "--cache", "snapkv:max_capacity_prompt=0.5"], "give a whole number", 3),
        (["chat", "no/model", "--cache", "kiwi"], "Did you mean 'kivi'", 3),
        (["chat", "no/model", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1", 1),
        (["chat", "llama-2-7b"], "a preset has no weights", 1),
        (["chat", "no/model", "--temperature", "nan"], "--temperature must be 0 or above", 1),
        (["chat", "no/model", "--temperature", "-1"], "--temperature must be 0 or above", 1),
        (["eval", "--model", "no/model", "--plot-x", "colour"], "--plot-x must be bits or bytes", 1),
        (["eval", "--model", "llama-3-8b"], "a preset has no weights", 1),
        (["eval", "--model", "no/model", "--prompt", "40"], "--prompt 40 is too short for", 1),
        (["eval"], "Missing option", 1),
        (["compat", "--attn", "flash"], "--attn must be sdpa or eager", 1),
    ],
)
def test_bad_input_is_one_line_that_names_the_fix(
    words: list[str], message: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("something was loaded")
    )
    assert message in fails(capsys, *words, lines=lines)


@pytest.mark.parametrize("command", ["bench", "chat", "eval"])
def test_models_that_are_not_there(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, "--model", str(tmp_path)] if command == "eval" else [command, str(tmp_path)]
    assert f"{tmp_path} cannot be loaded" in fails(capsys, *words)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that knows 128 positions and no more."""
    path = save_model(tmp_path_factory.mktemp("learned"))
    sizes = dict(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(path)
    return str(path)


def test_lengths_beyond_learned_positions(
    learned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (
        ["bench", learned, "--contexts", "128", "--caches", "kv"],
        ["eval", "--model", learned, "--prompt", "100", "--caches", "kv"],
        ["recommend", learned, "--gpu-memory", "700KB", "--context", "2000", "--caches", "rotated-2"],
    ):
        text = fails(capsys, *words)
        assert "learned positions for 128 (max_position_embeddings): ask for fewer" in text
    # An answer ends where positions do; a message beyond them is refused, and the turns before it are written.
    data = tmp_path / "c.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 100 + "\nb\n"))
    with pytest.raises(SystemExit) as caught:
        ask("chat", learned, "--json", str(data))
    text = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and text.startswith("error: ")
    assert "learned positions for 128" in text and "/reset" in text
    assert [turn["seen"] for turn in json.loads(data.read_text())["turns"]] == [128]


def test_rotary_and_biased_positions_go_on(folder: str) -> None:
    assert common.learned_positions(LlamaForCausalLM.from_pretrained(folder)) is None
    assert common.learned_positions(BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1))) is None


def test_models_without_sdpa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_model(tmp_path)
    config = BloomConfig(vocab_size=256, hidden_size=32, n_layer=2, n_head=4, eos_token_id=None, pad_token_id=0)
    BloomForCausalLM(config).save_pretrained(path)
    eval_ = ["eval", "--model", str(path), "--caches", "kv", "--prompt", "32", "--tokens", "2", "--windows", "1"]
    assert "does not support sdpa attention: give --attention eager" in fails(capsys, *eval_)
    words = ["recommend", str(path), "--gpu-memory", "700KB", "--context", "2000", "--caches", "rotated-2"]
    assert ask(*words, *MEASURE, "--max-kl", "100") == 0
    assert "is measured with --attention eager" in capsys.readouterr().err
    assert "give --attention eager" in fails(capsys, *words, *MEASURE, "--attention", "sdpa")


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "this torch sees no CUDA device; give --device cpu" in fails(capsys, "bench", "no/model", "--device", "cuda")


def test_model_types_that_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    for words in (["estimate", str(tmp_path)], ["recommend", str(tmp_path), "--gpu-memory", "1GB", "--context", "9"]):
        assert "does not know this model type; upgrade it" in fails(capsys, *words)
    assert "cannot be loaded" in fails(capsys, "bench", str(tmp_path))


def test_missing_matplotlib_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_kvcache.evaluate import plot

    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    target = str(tmp_path / "x.png")
    for words in (["estimate", "llama-3-8b"], ["bench", "no/model"], ["eval", "--model", "no/model"]):
        assert "plots need matplotlib: pip install" in fails(capsys, *words, "--plot", target)


# ---------------------------------------------------------------------- estimate


def test_estimate_prints_what_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["estimate", "llama-3-8b", "--context", "8192", "--batch", "32", "--gpu-memory", "80GB"]
    assert ask(*words, "--json", str(data), "--plot", str(picture)) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "1.07 GB  34.4 GB    1.000" in lines["DynamicCache"] and "older rows in host memory" in text
    found = json.loads(data.read_text())
    assert found["weights_bytes"] == 2 * 8_030_261_248 and found["rows"][0]["bytes_total"] == 32 * 2**30
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(found["rows"]) == sum(row["cache"] in lines for row in found["rows"])
    assert ask(*words, "--caches", "kivi-4", "rotated-2", "--gib", "--json", "-") == 0
    piped = json.loads(capsys.readouterr().out)
    assert [row["cache"] for row in piped["rows"]] == ["DynamicCache", "kivi-4", "rotated-2"]


def test_estimate_reproduces_the_survey(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "llama-2-70b", "--context", "4096", "--batch", "16", "--survey", "--caches", "kv"]
    assert ask(*words, "--json", str(tmp_path / "s.json")) == 0
    text = capsys.readouterr().out
    for name, figure, scales in (
        ("MHA ", "160 GiB", "has none"),
        ("GQA-8", "20.0 GiB", "has none"),
        ("MLA at 6.7% of MHA", "10.7 GiB", "has none"),
        ("GQA + INT4", "5.00 GiB", "no"),
        ("GQA + INT2", "2.50 GiB", "no"),
        ("H2O at 20x of MHA", "8.00 GiB", "has none"),
    ):
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert figure in line and f" {scales} " in line
    assert [row["scales"] for row in json.loads((tmp_path / "s.json").read_text())["survey"]] == [None] * 3 + [
        False
    ] * 2 + [None]


def test_estimate_says_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("estimate", "llama-3-8b", "--gpu-memory", "10GB", "--caches", "kv") == 0
    assert "Nothing fits: the weights alone take 16.1 GB. Try --weight-bits 4" in capsys.readouterr().out
    assert ask("estimate", "llama-3-8b", "--gpu-memory", "10GB", "--weight-bits", "4", "--caches", "kv") == 0
    assert "Nothing fits" not in capsys.readouterr().out


def test_estimate_lists_what_a_model_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hf_kvcache.compat.shrink import build

    build("deepseek_v3").config.save_pretrained(tmp_path)
    assert ask("estimate", str(tmp_path), "--context", "300") == 0
    text = capsys.readouterr().out
    assert "not for this model:" in text and "sharing:factor=2: `sharing` does not fit" in text and "latent-4 " in text


# ---------------------------------------------------------------------- recommend


def room_for(folder: str, spec: str, context: int) -> str:
    """So much memory that this cache just fits beside the weights."""
    from hf_kvcache.sizing import Sized, load_config, measure_sizes
    from hf_kvcache.specs import parse_spec

    sizes = measure_sizes(load_config(folder), torch.float32)
    return f"{4 * sizes.parameters + Sized(sizes, parse_spec(spec)).device(1, context)}B"


FEW = ("kv", "kivi-8:residual_length=16", "kivi-2:residual_length=16", "offload:resident_length=16,attend=compute")
MEASURE = ("--prompt", "96", "--tokens", "4", "--windows", "1", "--dtype", "fp32")


def pasted(text: str, folder: str) -> Any:
    """The cache that the printed Python makes."""
    lines = [line for line in text.splitlines() if line.startswith(("from hf_kvcache", "cache = "))]
    scope: dict[str, Any] = {"model": LlamaForCausalLM.from_pretrained(folder)}
    exec("\n".join(lines), scope)
    return scope["cache"]


def test_recommend_takes_the_full_cache_where_it_fits(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recommend", folder, "--gpu-memory", "1GB", "--context", "1000", "--caches", *FEW, *MEASURE]
    assert ask(*words) == 0
    captured = capsys.readouterr()
    assert "cache = KVCache(model)\n" in captured.out and "nothing is lost" in captured.out
    assert "[0/" not in captured.err, "something was measured in vain"


def test_recommend_lossless_goes_to_host_memory(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    memory = room_for(folder, "kivi-8:residual_length=16", 1000)
    words = ["recommend", folder, "--gpu-memory", memory, "--context", "1000", "--dtype", "fp32"]
    assert ask(*words, "--lossless", "--caches", *FEW) == 0
    cache = pasted(capsys.readouterr().out, folder)
    assert cache.codec is None and cache.offload.resident_length == 16
    assert "no lossless cache fits: allow a little loss with --max-kl" in fails(
        capsys, *words, "--lossless", "--caches", "kivi-2:residual_length=16"
    )


def test_recommend_measures_what_fits(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = room_for(folder, "kivi-8:residual_length=16", 1000)
    data = tmp_path / "rec.json"
    words = ["recommend", folder, "--gpu-memory", memory, "--context", "1000", "--caches", *FEW]
    assert ask(*words, *MEASURE, "--max-kl", "0.5", "--json", str(data)) == 0
    captured = capsys.readouterr()
    assert "kv " not in captured.err.replace("full cache", ""), "a cache that does not fit was measured"
    cache = pasted(captured.out, folder)
    assert cache.codec.nbits == 8 and "nats a token" in captured.out
    found = json.loads(data.read_text())
    by_name = {entry["cache"]: entry for entry in found["candidates"]}
    assert found["chosen"]["cache"] == "kivi-8:residual_length=16" and not by_name["kv"]["fits"]
    assert 0 < by_name["kivi-8:residual_length=16"]["kl"] < by_name["kivi-2:residual_length=16"]["kl"]
    # The same from the file, without loading anything; with `--smallest` and room in KL, the other one.
    stored = ["recommend", folder, "--gpu-memory", memory, "--context", "1000", "--dtype", "fp32"]
    stored += ["--measurements", str(data)]
    assert ask(*stored, "--max-kl", "0.5") == 0
    captured = capsys.readouterr()
    assert pasted(captured.out, folder).codec.nbits == 8 and "[0/" not in captured.err
    assert ask(*stored, "--max-kl", "100", "--smallest") == 0
    captured = capsys.readouterr()
    assert pasted(captured.out, folder).codec.nbits == 2 and "note:" not in captured.err
    # Not for another model: by its config, or by its name where an older file has no config.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(folder).parent)
        assert ask("recommend", Path(folder).name, *stored[2:], "--max-kl", "0.5") == 0
    copy = tmp_path / "copy"
    config = LlamaForCausalLM.from_pretrained(folder).config
    config.save_pretrained(copy)
    assert ask("recommend", str(copy), *stored[2:], "--max-kl", "0.5") == 0
    assert f"note: {data} was measured on {folder}, which has the same config" in capsys.readouterr().err
    config.num_key_value_heads = 4
    config.save_pretrained(tmp_path / "other")
    other = ["recommend", str(tmp_path / "other"), "--gpu-memory", "1GB", *stored[4:]]
    assert "(num_key_value_heads 2 and not 4): measure this one with `hf-kvcache eval" in fails(capsys, *other)
    del found["measurements"]["model"]["config"]
    data.write_text(json.dumps(found))
    assert f"was measured on {folder}, not on {copy} (another name)" in fails(
        capsys, "recommend", str(copy), *stored[2:]
    )


def test_recommend_says_why_there_is_none(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = room_for(folder, "kivi-8:residual_length=16", 1000)
    data = tmp_path / "rec.json"
    words = ["recommend", folder, "--gpu-memory", memory, "--context", "1000", *MEASURE]
    with pytest.raises(SystemExit) as caught:
        ask(*words, "--max-kl", "1e-9", "--caches", "kivi-2:residual_length=16", "--json", str(data))
    assert caught.value.code == 2
    assert "no cache that fits stays within --max-kl 1e-09: the best that fits, kivi-2" in capsys.readouterr().err
    assert json.loads(data.read_text())["measurements"]["caches"][0]["kl"] > 0, "what was measured is lost"
    fixed = fails(capsys, *words, "--caches", "window:window_length=64")
    assert "window_length of a candidate counts tokens" in fixed and "give a share" in fixed
    data.write_text('{"caches": [{"spec": "kv", "kl": "low", "top1": 1}]}')
    for content in (
        '{"caches": [{"spec": "kv", "kl": "low", "top1": 1}]}',
        "[",
        "{}",
        '{"caches": [{"spec": "nope"}]}',
    ):
        data.write_text(content)
        assert "holds no measurements" in fails(capsys, *words, "--measurements", str(data))
    data.write_text('{"caches": [{"spec": "kivi-4", "kl": 0.1, "top1": 1}]}')
    assert "does not say which model was measured" in fails(capsys, *words, "--measurements", str(data))
    data.write_text(json.dumps({"model": {"name": folder}, "caches": [{"spec": "kivi-4", "kl": 0.1, "top1": 1}]}))
    text = fails(capsys, *words, "--measurements", str(data), "--caches", "kivi-8:residual_length=16")
    assert "none that fits was measured" in text


def test_recommend_refuses_models_that_no_candidate_goes_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_kvcache.compat.shrink import build

    build("deepseek_v3").config.save_pretrained(tmp_path)
    words = ["recommend", str(tmp_path), "--gpu-memory", "1GB", "--context", "100", "--caches", "sharing:factor=2"]
    assert "no candidate goes with this model: `sharing` does not fit" in fails(capsys, *words)


def test_fidelity_does_not_depend_on_where_rows_lie() -> None:
    assert rules.measured_as("rotated-4+offload:resident_length=64") == "rotated-4"
    assert rules.measured_as("paged+snapkv:max_capacity_prompt=0.5") == "snapkv:max_capacity_prompt=0.5"
    assert rules.measured_as("offload") == "kv"
    assert rules.measured_as("offload:top_pages=0.5") == "offload:top_pages=0.5"


# ---------------------------------------------------------------------- bench


def test_bench_times_every_cache_at_every_context(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, picture = tmp_path / "b.json", tmp_path / "b.png"
    words = ["bench", folder, "--contexts", "64", "32", "--caches", "kv", SMALL, "--steps", "2", "--chunk", "20"]
    assert ask(*words, "--dtype", "fp32", "--threads", "1", "--json", str(data), "--plot", str(picture)) == 0
    text = capsys.readouterr().out
    found = json.loads(data.read_text())
    assert [entry["tokens"] for entry in found["contexts"]] == [32, 64] and "interrupted" not in found
    for entry in found["contexts"]:
        assert [row["cache"] for row in entry["rows"]] == ["DynamicCache", "kv", SMALL]
        assert all(len(times) == 2 + decode.WARM_UP for times in entry["times"].values())
        assert entry["rows"][0]["times faster"] == 1 and all(row["ms"] > 0 for row in entry["rows"])
    assert "32 tokens" in text and "64 tokens" in text and text.count(SMALL) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_interleaves(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    order = []
    real = decode.step

    def spy(model: Any, cache: Any, token: Any) -> float:
        order.append(type(cache).__name__)
        return real(model, cache, token)

    monkeypatch.setattr(decode, "step", spy)
    ids = torch.arange(40)[None]
    decode.decode_times(model, ids, [40], ["kv"], steps=2)
    assert order == ["DynamicCache", "KVCache"] * 4
    with pytest.raises(ValueError, match="the text has 40 tokens and the longest context is 41"):
        decode.decode_times(model, ids, [41], ["kv"])
    with pytest.raises(ValueError, match="`steps` must be at least 1"):
        decode.decode_times(model, ids, [4], ["kv"], steps=0)


def test_bench_keeps_the_contexts_that_were_done(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = decode.step

    def stops(*args: Any) -> float:
        nonlocal calls
        calls += 1
        if calls > 2 * (1 + decode.WARM_UP) + 1:  # in the second context
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(decode, "step", stops)
    data = tmp_path / "b.json"
    words = ["bench", folder, "--contexts", "32", "48", "--caches", "kv", "--steps", "1", "--json", str(data)]
    assert ask(*words) == 130
    found = json.loads(data.read_text())
    assert found["interrupted"] is True and [entry["tokens"] for entry in found["contexts"]] == [32]
    assert "interrupted: longer contexts were not measured" in capsys.readouterr().out
    calls = 100
    data.unlink()
    assert ask(*words) == 130 and not data.exists()
    assert capsys.readouterr().err.endswith("interrupted\n")


# ---------------------------------------------------------------------- eval and compat: what Ctrl-C leaves


def words_of_eval(folder: str, data: Path, windows: int = 3) -> list[str]:
    words = ["eval", "--model", folder, "--caches", "kv", "kivi-2:residual_length=16", "--prompt", "48"]
    return [*words, "--tokens", "8", "--windows", str(windows), "--json", str(data)]


@pytest.mark.parametrize(("passes", "windows", "caches"), [(5, 1, 2), (8, 2, 2), (2, 0, 1), (9, 3, 2)])
def test_eval_keeps_the_windows_that_were_done(
    passes: int,
    windows: int,
    caches: int,
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = 0
    real = measure._decode

    def stops(*args: Any) -> Any:
        nonlocal done
        done += 1
        if done > passes:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(measure, "_decode", stops)
    data = tmp_path / "e.json"
    assert ask(*words_of_eval(folder, data)) == (0 if windows == 3 else 130)
    found = json.loads(data.read_text())
    assert len(found["caches"]) == caches == len(found["arguments"]["caches"])
    assert all(len(entry["windows"]) == max(windows, 1) for entry in found["caches"])
    assert ("interrupted" in found) is (windows < 3)
    if windows < 3:
        assert found["interrupted"]["windows_done"] == windows
        assert f"interrupted: {windows} of 3 windows were done" in capsys.readouterr().out


def test_points_without_loss_are_marked_in_the_picture(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    words: list[str] = []
    real = figure.savefig

    def look(self: Any, *args: Any, **kwargs: Any) -> None:
        words.extend(text.get_text() for text in self.axes[0].get_legend().get_texts())
        real(self, *args, **kwargs)

    monkeypatch.setattr(figure, "savefig", look)
    assert ask(*words_of_eval(folder, tmp_path / "e.json", windows=1), "--plot", str(tmp_path / "e.png")) == 0
    assert words == ["front", "1  kv (KL 0)", "2  kivi-2:residual_length=16"]


def test_ctrl_c_for_real(folder: str, tmp_path: Path) -> None:
    """A signal to a process that has told that it is in its third window."""
    data = tmp_path / "e.json"
    command = [sys.executable, "-m", "hf_kvcache", *words_of_eval(folder, data, windows=15)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    ) as process:
        assert process.stderr is not None
        rest = ""
        for line in process.stderr:
            rest += line
            if line.startswith("[8/"):
                process.send_signal(signal.SIGINT)
        assert process.wait() == 130 and "Traceback" not in rest, rest
    assert json.loads(data.read_text())["interrupted"]["windows_done"] >= 2


def test_eval_without_anything_to_keep(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "_decode", stops)
    assert ask(*words_of_eval(folder, tmp_path / "e.json")) == 130
    assert not (tmp_path / "e.json").exists()


def test_compat_keeps_the_types_that_were_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compat_run.run_type

    def stops(model_type: str, *args: Any) -> Any:
        if model_type == "qwen2":
            raise KeyboardInterrupt
        return real(model_type, *args)

    monkeypatch.setattr(compat_run, "run_type", stops)
    data, page = tmp_path / "c.json", tmp_path / "c.md"
    words = [
        "compat",
        "--types",
        "llama,qwen2,mistral",
        "--caches",
        "KVCache",
        "--json",
        str(data),
        "--markdown",
        str(page),
    ]
    assert ask(*words) == 130
    found = json.loads(data.read_text())
    assert found["interrupted"] is True and [r["type"] for r in found["results"]] == ["llama"] and not page.exists()
    assert "KVCache: 1 equal" in capsys.readouterr().out


# ---------------------------------------------------------------------- chat


def talk(
    words: list[str], lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path
) -> tuple[int, list[dict[str, Any]], str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code = ask("chat", *words, "--max-new-tokens", "6", "--json", str(data))
    captured = capsys.readouterr()
    return code, json.loads(data.read_text())["turns"], captured.out, captured.err


@pytest.mark.parametrize("template", [False, True])
def test_chat_answers_as_the_whole_conversation_would(
    template: bool,
    folder: str,
    chatty: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = chatty if template else folder
    code, turns, out, err = talk([name], "hello there\n\nand now?\nthird\n", monkeypatch, capsys, tmp_path / "c.json")
    assert code == 0 and [turn["user"] for turn in turns] == ["hello there", "and now?", "third"]
    assert out.startswith("> hello there\n") and err.count("tokens, ") == 3
    # Recomputed with the whole history as one prompt, without this library's caches.
    model = LlamaForCausalLM.from_pretrained(name).eval()
    conversation = chat_module.Conversation(
        model, *[__import__("transformers").AutoTokenizer.from_pretrained(name)], from_spec(model, "kv")
    )
    ids = torch.zeros(1, 0, dtype=torch.long)
    for turn in turns:
        conversation.ids = ids
        prompt = torch.cat([ids, torch.tensor([conversation._turn(turn["user"])])], dim=1)
        detach(model)
        ids = model.generate(
            prompt, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt), pad_token_id=0
        )
        assert conversation.tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True) == turn["reply"]
        assert turn["seen"] in (ids.shape[1] - 1, ids.shape[1])
    if template:
        text = conversation.tokenizer.decode(ids[0])
        assert text.startswith("<user>hello there~\n<assistant>") and text.count("<user>") == 3
        assert text.count("~\n<user>and now?~\n<assistant>") == 1


def test_chat_shows_what_is_kept(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [chatty, "--cache", "snapkv:max_capacity_prompt=24,window_size=8", "--system", "Be brief."]
    long = "a rather long first message that is cut to the capacity of the cache"
    code, turns, out, err = talk(
        words, f"{long}\nnext\n/what\n/reset\nagain\n/quit\nnever\n", monkeypatch, capsys, tmp_path / "c.json"
    )
    assert code == 0 and [turn["user"] for turn in turns] == [long, "next", "again"]
    assert all(max(turn["kept"]) < 24 + 6 + 6 < turn["seen"] for turn in turns[:2])
    assert (
        f"[kept {turns[0]['kept'][0]} of {turns[0]['seen']} tokens, " in err
        and chat_module.HELP in err
        and "forgotten" in err
    )
    assert turns[2]["seen"] < turns[0]["seen"], "reset forgot nothing"


def test_chat_reads_bytes_that_are_no_text(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "c.json"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nnext\n"), encoding="utf-8"))
    assert ask("chat", folder, "--max-new-tokens", "2", "--json", str(data)) == 0
    assert [turn["user"] for turn in json.loads(data.read_text())["turns"]] == ["caf\ufffd", "next"]


def test_chat_samples_with_a_seed(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replies(*more: str) -> list[str]:
        words = [folder, "--temperature", "2.0", *more]
        return [turn["reply"] for turn in talk(words, "one\ntwo\n", monkeypatch, capsys, tmp_path / "c.json")[1]]

    assert replies("--seed", "1") == replies("--seed", "1") != replies("--seed", "2")


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = chat_module._Stream.put
    count = 0

    def put(self: Any, value: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:  # the prompt, two tokens, and the third one
            os.kill(os.getpid(), signal.SIGINT)
        real(self, value)

    monkeypatch.setattr(chat_module._Stream, "put", put)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        code, turns, _, _ = talk([folder], "one\ntwo\n", monkeypatch, capsys, tmp_path / "c.json")
        assert code == 0 and [turn["stopped"] for turn in turns] == [True, False]
        assert turns[0]["tokens"] < 6 == turns[1]["tokens"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_the_prompt_writes_what_was_said(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines() -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "_lines", lines)
    code, turns, _, _ = talk([folder], "", monkeypatch, capsys, tmp_path / "c.json")
    assert code == 130 and [turn["user"] for turn in turns] == ["one"]


def test_chat_refuses_what_the_template_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    name = str(save_model(tmp_path / "strict", template))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert "no system role; leave --system out" in fails(capsys, "chat", name, "--system", "Be brief.")


def test_a_status_line_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", Terminal())
    with chat_module.status_line() as status:
        status.show(lambda: "kept 3 of 9 tokens")
        status.show(lambda: pytest.fail("more than ten times a second"))
    text = screen.getvalue()
    assert "kept 3 of 9 tokens" in text and text.index("r\x1b8") < text.index("kept") < text.rindex("\x1b[r")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with chat_module.status_line() as status:
        status.show(lambda: pytest.fail("shown where there is no terminal"))


def test_a_bar_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Timer:
        def __init__(self, seconds: float, function: Any) -> None:
            self.function, self.late = function, seconds <= elapsed

        def start(self) -> None:
            if self.late:
                self.function()

        def cancel(self) -> None: ...

        def join(self) -> None: ...

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(common, "threading", SimpleNamespace(Timer=Timer))
    shown = []
    for elapsed in (0.5, 2.0):  # noqa: B007 (the timer looks at it)
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        with common.progress() as tell:
            tell(1, 4, "the second of four")
        shown.append("1/4" in screen.getvalue())
    assert shown == [False, True]


def test_the_cache_argument_is_the_models(folder: str) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    assert cache_argument(model) in ("cache", "past_key_values")


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        common.write_json(target, {"a": object()})
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
