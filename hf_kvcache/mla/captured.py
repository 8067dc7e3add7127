"""What the attention of the original model takes and gives, from the model itself or from files written before.

Files come from outside, so nothing in them is trusted: safetensors and JSON, every name, shape and dtype checked, and a
SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from .chain import Chain
from .convert import _batches
from .host import attention_modules
from .module import MLAAttention
from .progress import Tell, bar

_VERSION = 1
_MANIFEST = "captured.json"
_LARGEST = 64 << 20  # bytes of a description
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Seen(NamedTuple):
    """One window at one layer, each `[T, hidden]`."""

    residual: torch.Tensor  # what goes into the decoder layer
    hidden: torch.Tensor  # what goes into its attention
    output: torch.Tensor  # what its attention gives


class Live:
    """The original model itself, run one layer at a time."""

    def __init__(self, model: PreTrainedModel, names: list[str], windows: list[torch.Tensor]) -> None:
        self.chain = Chain(model, names)
        self.states = [self.chain.start(ids) for ids in windows]

    def layer(self, index: int) -> list[Seen]:
        """All windows at one layer. Layers come in order."""
        found = []
        for window, state in enumerate(self.states):
            after, hidden, output = self.chain.watched(index, state)
            found.append(Seen(state[0], hidden, output))
            self.states[window] = after
        return found


class Stored:
    """Files of `capture_layers`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path)
        content = read_json(self.folder / _MANIFEST, "write it with `capture_layers`")
        try:
            names, windows, files, size = (content[key] for key in ("names", "windows", "files", "hidden_size"))
            good = (
                content["format_version"] == _VERSION
                and all(isinstance(name, str) for name in names)
                and all(
                    isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids) for ids in windows
                )
                and len(files) == len(names)
                and all(isinstance(digest, str) for digest in files)
                and type(size) is int
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.folder / _MANIFEST} lacks {error}") from error
        if not good:
            raise ValueError(f"{self.folder / _MANIFEST} is not understood (format version {_VERSION} is read)")
        self.names, self.size, self.files = names, size, files
        self.windows = [torch.tensor(ids)[None] for ids in windows]

    def layer(self, index: int) -> list[Seen]:
        tensors = read_tensors(self.folder / _file(index), self.files[index])
        wanted = {f"{part}.{w}": ids.shape[1] for w, ids in enumerate(self.windows) for part in Seen._fields}
        if set(tensors) != set(wanted) or any(
            tensor.shape != (wanted[name], self.size) or tensor.dtype not in _DTYPES for name, tensor in tensors.items()
        ):
            raise ValueError(f"{self.folder / _file(index)} holds other tensors than it should")
        return [Seen(*(tensors[f"{part}.{w}"] for part in Seen._fields)) for w in range(len(self.windows))]


def capture_layers(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    calibration: Iterable[Any],
    tokenizer: Any = None,
    *,
    progress: bool | Tell = True,
) -> None:
    """Write what every attention module of the original `model` takes and gives, for `distill_layers`.

    So that the original need not be in memory beside the converted one: capture, convert, distill. Layer by layer: in
    memory are the model and one layer's states. The folder takes `3 * tokens * layers * hidden_size` numbers in the
    model's dtype.

    Args:
        model: the model before its conversion.
        path: a folder, made if it is not there; it must hold no capture yet.
        calibration, tokenizer: as for `convert_to_mla`.
        progress: show a bar on stderr if it takes longer than two seconds (where rich is installed).

    Raises:
        ValueError: a model that is converted, a calibration that cannot be used, a folder that is in use.
        NotImplementedError: a model without known attention, or whose layers do not form a chain.
    """
    folder = Path(path)
    if (folder / _MANIFEST).exists():
        raise ValueError(f"{folder} holds a capture already: delete it or name another folder")
    windows = windows_of(calibration, tokenizer, model)
    names = names_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), bar(progress, len(names), "capturing") as advance:
            live = Live(model, names, windows)
            for index in range(len(names)):
                tensors = {}
                for w, seen in enumerate(live.layer(index)):
                    for part, tensor in zip(Seen._fields, seen, strict=True):
                        tensors[f"{part}.{w}"] = tensor.cpu().contiguous().clone()
                files.append(write_tensors(folder / _file(index), tensors))
                advance(names[index])
    finally:
        model.train(was_training)
    content = {
        "format_version": _VERSION,
        "names": names,
        "windows": [ids[0].tolist() for ids in windows],
        "files": files,
        "hidden_size": model.config.hidden_size,
    }
    write_json(folder / _MANIFEST, content)


def names_of(model: PreTrainedModel) -> list[str]:
    """Attention modules of an original model. Raises for models that are converted, or have none that is known."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"the original must be a transformers model, got {type(model).__name__}")
    if any(isinstance(module, MLAAttention) for module in model.modules()):
        raise ValueError("the original is converted too: load it again from its own checkpoint")
    names = [name for name, _ in attention_modules(model)]
    if not names:
        raise NotImplementedError(f"{type(model).__name__} has no attention that could have been converted")
    return names


def windows_of(calibration: Iterable[Any], tokenizer: Any, model: PreTrainedModel) -> list[torch.Tensor]:
    """Rows of token ids `[1, T]`."""
    return [row[None] for ids in _batches(calibration, tokenizer, model) for row in ids]


# ---------------------------------------------------------------------- files


def _file(index: int) -> str:
    return f"layer-{index:05d}.safetensors"


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no {path}: {otherwise}")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path} is too large for what it should be")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or altered ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not understood")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """All of it, or what was there before."""
    aside = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        aside.write_text(json.dumps(content), encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Returns the file's SHA-256."""
    aside = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        save_file(tensors, str(aside))
        digest = _digest(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return digest


def read_tensors(path: Path, digest: str) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise ValueError(f"there is no {path}, which its description lists")
    if _digest(path) != digest:
        raise ValueError(f"{path} does not match its checksum (truncated or altered)")
    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file ({error})") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
