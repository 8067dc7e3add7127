"""Entries of a prefix store in files: a folder of this machine, or any place that fsspec reaches.

One entry is one safetensors file, whose header says in JSON what it holds; its name is a hash of that. A file appears
whole or not at all, so writers need not know of each other. Nothing in a file is believed before its name, the
checksum of its description and the SHA-256 of every tensor agree.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

FORMAT_VERSION = 1
SUFFIX = ".safetensors"
_KEY = "hf_kvcache_prefix"
_MOST_HEADER = 1 << 26
_ORPHAN_SECONDS = 3600.0
# Where one call puts a whole object, or none of it. Elsewhere a file is written aside and moved.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2", "memory"}


class DamagedFile(ValueError):
    """A file is not what its name says, or not the one that is wanted.

    `is_certain`: it was read, and is of no use to anybody.
    """

    def __init__(self, text: str, file: str | None = None, is_certain: bool = True) -> None:
        super().__init__(text)
        self.file = file
        self.is_certain = is_certain


def name_of(description: dict[str, Any]) -> str:
    """The file name of an entry: what it is, not what its numbers are."""
    parts = {name: description[name] for name in ("format_version", "kind", "key", "start", "tokens")}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{description['kind']}-{digest[:40]}{SUFFIX}"


class Folder:
    """A place of files: bytes in, bytes out, nothing half.

    Raises `ImportError` for a URL where fsspec is not installed, and `ValueError` for a protocol it does not know.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.fs: Any = None
        protocol = self.path.partition("://")[0] if "://" in self.path else ""
        if protocol in ("", "file", "local"):
            self.path = self.path.partition("://")[2] if protocol else self.path
            os.makedirs(self.path, exist_ok=True)
            return
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(
                f"a store at {self.path} needs fsspec (pip install 'hf-kvcache[prefix]'), and the package of its "
                "protocol, such as s3fs"
            ) from error
        self.fs, self.path = fsspec.core.url_to_fs(self.path)
        protocols = self.fs.protocol if isinstance(self.fs.protocol, (list, tuple)) else [self.fs.protocol]
        # Others can say of themselves that a put is whole (`whole_object_put`).
        self.whole_put = bool(_OBJECT_STORES.intersection(protocols)) or getattr(self.fs, "whole_object_put", False)

    def names(self, sub: str) -> list[str]:
        """Entry files in a subfolder."""
        if self.fs is None:
            folder = os.path.join(self.path, sub)
            found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        else:
            self.fs.invalidate_cache()
            folder = f"{self.path}/{sub}"
            found = (
                sorted(str(p).rpartition("/")[2] for p in self.fs.ls(folder, detail=False))
                if self._is_dir(folder)
                else []
            )
        return [f"{sub}/{name}" for name in found if name.endswith(SUFFIX)]

    def _is_dir(self, folder: str) -> bool:
        try:
            return self.fs.isdir(folder)
        except FileNotFoundError:
            return False

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.fs is not None:
            return self.fs.cat_file(f"{self.path}/{name}", start=start, end=stop)
        with open(os.path.join(self.path, name), "rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def exists(self, name: str) -> bool:
        if self.fs is not None:
            return bool(self.fs.exists(f"{self.path}/{name}"))
        return os.path.exists(os.path.join(self.path, name))

    def write(self, name: str, data: bytes) -> None:
        """Put a whole file in place of whatever had that name."""
        aside = f"{name}.part{os.getpid()}-{threading.get_ident()}"
        if self.fs is None:
            target, aside = os.path.join(self.path, name), os.path.join(self.path, aside)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                with open(aside, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, target)
            finally:
                if os.path.exists(aside):
                    os.remove(aside)
            return
        target = f"{self.path}/{name}"
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        if self.whole_put:
            self.fs.pipe_file(target, data)
            return
        aside = f"{self.path}/{aside}"
        try:
            self.fs.pipe_file(aside, data)
            self.fs.mv(aside, target)
        finally:
            if self.fs.exists(aside):
                self.fs.rm_file(aside)

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is gone already."""
        try:
            if self.fs is None:
                os.remove(os.path.join(self.path, name))
            else:
                self.fs.rm_file(f"{self.path}/{name}")
        except FileNotFoundError:
            pass

    def sizes(self) -> list[tuple[float, int, str]]:
        """(last modification, bytes, name) of every entry file."""
        found = []
        if self.fs is None:
            for folder, _, files in os.walk(self.path):
                for name in files:
                    path = os.path.join(folder, name)
                    try:
                        info = os.stat(path)
                    except FileNotFoundError:
                        continue
                    found.append((info.st_mtime, info.st_size, os.path.relpath(path, self.path)))
        else:
            self.fs.invalidate_cache()
            for path, info in self.fs.find(self.path, detail=True).items():
                when = info.get("LastModified") or info.get("created") or info.get("mtime") or 0.0
                when = when.timestamp() if hasattr(when, "timestamp") else float(when)
                found.append((when, int(info["size"]), str(path)[len(self.path) :].lstrip("/")))
        return sorted(entry for entry in found if entry[2].endswith(SUFFIX))

    def clear_orphans(self, sub: str) -> None:
        """Remove what writers that were killed have left aside (on this machine; object stores keep no halves)."""
        folder = os.path.join(self.path, sub)
        if self.fs is not None or not os.path.isdir(folder):
            return
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            try:
                if f"{SUFFIX}.part" in name and time.time() - os.path.getmtime(path) > _ORPHAN_SECONDS:
                    os.remove(path)
            except OSError:
                pass

    def touch(self, name: str) -> None:
        """Note a use, for `sizes`. Object stores know only when an object was written."""
        if self.fs is None:
            try:
                os.utime(os.path.join(self.path, name))
            except OSError:
                pass


def pack(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """An entry as the bytes of its file."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    whole = {
        "format_version": FORMAT_VERSION,
        **description,
        "sha256": {name: _sha256(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(whole)
    return save_bytes(tensors, metadata={_KEY: text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def describe(folder: Folder, name: str) -> dict[str, Any]:
    """The description of an entry, from the header of its file alone.

    Raises `DamagedFile` for anything but an entry of this format that has its own name.
    """
    size = int.from_bytes(folder.read(name, 0, 8), "little")
    if not 2 <= size <= _MOST_HEADER:
        raise DamagedFile(f"{name}: truncated, altered or not a safetensors file", name)
    return _description(name, folder.read(name, 8, 8 + size))


def unpack(folder: Folder, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Description and tensors of an entry, everything verified. Raises `DamagedFile`."""
    try:
        data = folder.read(name)
    except Exception as error:  # each file system has its own
        raise DamagedFile(f"{name}: cannot be read ({error})", name, is_certain=False) from error
    size = int.from_bytes(data[:8], "little")
    description = _description(name, data[8 : 8 + size])
    try:
        tensors = load_bytes(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedFile(f"{name}: truncated or altered ({error})", name) from error
    sums = description["sha256"]
    if not isinstance(sums, dict) or set(sums) != set(tensors):
        raise DamagedFile(f"{name}: holds other tensors than it lists", name)
    for key, tensor in tensors.items():
        if _sha256(tensor) != sums[key]:
            raise DamagedFile(f"{name}: tensor {key} does not match its checksum", name)
    return description, tensors


def _description(name: str, header: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(header)["__metadata__"]
        text = metadata[_KEY]
        description = json.loads(text)
        if description["format_version"] != FORMAT_VERSION:
            other = f"{name}: of format version {description['format_version']!r}, this version reads {FORMAT_VERSION}"
            raise DamagedFile(other, name, is_certain=False)
        right = metadata["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        tokens = description["tokens"]
        right = right and name_of(description) == name.rpartition("/")[2]
        right = right and all(type(t) is int for t in tokens) and type(description["start"]) is int
        right = right and 0 <= description["start"] <= len(tokens)
    except DamagedFile:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{name}: truncated, altered or no entry of a prefix store ({error})", name) from error
    if not right:
        raise DamagedFile(f"{name}: altered, or under a name that is not its own", name)
    return description


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
