"""Folders that are whole or not there: written beside their place under another name, and renamed at the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Files that a tokenizer is read from.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)
# Endings of the files of a checkpoint.
_CHECKPOINT = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja", ".md", ".bin", ".py"})
_SLACK = 1 << 24  # config, tokenizer, headers


def check_room(
    path: str | os.PathLike[str], nbytes: int, overwrite: bool = False, source: str | os.PathLike[str] | None = None
) -> Path:
    """The absolute path of a folder to be written, if it can be.

    Args:
        overwrite: a checkpoint that is there may be replaced. Nothing else ever is.
        source: the folder that is read from, if it is one: neither it nor a folder around it is replaced.

    Raises:
        ValueError: it exists already and holds something (unless `overwrite`) or what is no checkpoint, it is or holds
            the source, or it is a file.
        OSError: the disk has no room for `nbytes`.
    """
    target = Path(path).absolute()
    if target.exists():
        if not target.is_dir():
            raise ValueError(f"{target} is a file: give a folder")
        if any(target.iterdir()) and not overwrite:
            raise ValueError(f"{target} is not empty: give another folder, or say `overwrite=True` (`--overwrite`)")
        real = target.resolve()
        read = None if source is None or not os.path.exists(source) else Path(source).resolve()
        if read is not None and (real == read or real in read.parents):
            raise ValueError(f"{target} is or holds the model that is read ({read}): give another folder")
        strange = _no_checkpoint(target)
        if strange:
            raise ValueError(
                f"{target} holds what is no checkpoint ({strange}), and is not replaced: give another folder"
            )
    existing = next(parent for parent in (target, *target.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes + _SLACK:
        raise OSError(
            f"{target} needs {(nbytes + _SLACK) / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB left: make room, or "
            "write somewhere else"
        )
    return target


def _no_checkpoint(folder: Path) -> str:
    """What says that a folder is not just a checkpoint; empty if nothing does."""
    entries = sorted(folder.iterdir())
    for entry in entries:
        if not entry.is_file() or entry.suffix not in _CHECKPOINT:
            return entry.name
    return "" if not entries or (folder / "config.json").is_file() else "no config.json"


@contextmanager
def new_folder(
    path: str | os.PathLike[str], nbytes: int, overwrite: bool = False, source: str | os.PathLike[str] | None = None
) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` when the block ends, and goes away if it fails.

    It lies beside `path` as `.NAME.*.partial` until then, so a killed process leaves nothing under the name that was
    asked for, and what was there before stays until the new one is whole. Raises as `check_room`.
    """
    target = check_room(path, nbytes, overwrite, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield scratch
        # As `mkdir` and `open` would have made them; `mkdtemp` and safetensors make private ones.
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o777 & ~umask)
        for file in scratch.iterdir():
            if file.is_file():
                file.chmod(0o666 & ~umask)
        old = None
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".replaced", dir=target.parent))
            target.rename(old)
        scratch.rename(target)
        if old is not None:
            shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def bytes_of(size: int | str) -> int:
    """Bytes of a size as transformers takes it: a number, or text such as "5GB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)?\s*", str(size).upper())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"a size must be a number of bytes or text such as '5GB', got {size!r}")
    unit = (match[2] or "").lstrip("B") or ""
    return int(float(match[1]) * _UNITS[unit])


class ShardWriter:
    """Safetensors files `model-0000N-of-0000M.safetensors` with their index, one shard in memory at a time."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.waiting: dict[str, torch.Tensor] = {}
        self.held = self.total = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.waiting and self.held + tensor.nbytes > self.shard_bytes:
            self._flush()
        self.waiting[name] = tensor
        self.held += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.waiting, str(self.folder / f"shard-{len(self.shards)}"), metadata={"format": "pt"})
        self.shards.append(list(self.waiting))
        self.waiting, self.held = {}, 0

    def close(self) -> None:
        """Write what is left, and give the files the names that `from_pretrained` looks for."""
        if self.waiting:
            self._flush()
        if len(self.shards) == 1:
            (self.folder / "shard-0").rename(self.folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self.shards):
            file = f"model-{number + 1:05d}-of-{len(self.shards):05d}.safetensors"
            (self.folder / f"shard-{number}").rename(self.folder / file)
            where.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total}, "weight_map": where}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Any, source: str | None) -> None:
    """Save the tokenizer, or copy its files from the local folder that the model was loaded from."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return
    if not source or not os.path.isdir(source):
        return
    for file in _existing(Path(source), _TOKENIZER):
        shutil.copyfile(file, folder / file.name)


def _existing(folder: Path, names: Iterable[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]
