"""Compile `kernels.cpp` for this machine, into a cache folder of the user's own."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
COMMON = ("-std=c++17", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
# The first set that the compiler takes. Without OpenMP the kernels run on one thread.
MACHINE = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ())


def compiler() -> list[str]:
    """The C++ compiler as a command: `$CXX`, or the first of c++, g++ and clang++."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    looked = f"CXX={named[0]} is not found" if named else "none of c++, g++ and clang++ is found"
    raise ImportError(
        f"the native CPU kernels need a C++17 compiler, and {looked}: install one (Debian and Ubuntu: "
        "`apt-get install g++`; conda: `conda install cxx-compiler`), or set CXX, or leave HF_KVCACHE_NATIVE unset"
    )


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/hf_kvcache/native`, or the same under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The convention: a relative path is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "hf_kvcache" / "native"


def build(force: bool = False, flags: Sequence[str] | None = None) -> Path:
    """Path of the shared library, compiled if it is not there yet (a few seconds).

    Args:
        force: compile even if it is there.
        flags: flags for the machine, instead of the best that the compiler takes (for tests: `["-mavx2", "-mfma"]`).
    """
    if not hasattr(os, "getuid"):
        raise ImportError("the native CPU kernels build on Linux and macOS only: leave HF_KVCACHE_NATIVE unset")
    command = compiler()
    sets = MACHINE if flags is None else (tuple(flags),)
    folder = cache_folder() / _key(command, sets)
    library = folder / "kernels.so"
    _make_private(folder)
    if library.exists() and not force:
        _check_private(library)
        return library
    # Others may build the same at the same time: each writes a file of its own, and the last rename wins.
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _compile(command, sets, Path(name))
        os.chmod(name, 0o700)
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)
    return library


def _compile(command: list[str], sets: Sequence[Sequence[str]], output: Path) -> None:
    errors = ""
    for flags in sets:
        line = [*command, *COMMON, *flags, str(SOURCE), "-o", str(output)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        errors += f"$ {shlex.join(line)}\n{done.stderr[-2000:]}\n"
    raise RuntimeError(
        f"{command[0]} could not compile the native CPU kernels: set CXX to a compiler for C++17 (gcc 9, clang 10 or "
        f"newer), or leave HF_KVCACHE_NATIVE unset\n{errors}"
    )


def _key(command: list[str], sets: Sequence[Sequence[str]]) -> str:
    """Source, flags, compiler and CPU in a name: a home folder may be shared by unlike machines."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(repr((command, COMMON, sets, sys.platform)).encode())
    for probe in (("-march=native",), ("-mcpu=native",), ()):
        # The predefined macros name the compiler's version and every instruction set that it would use.
        line = [*command, *probe, "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(line, capture_output=True, check=False)
        if done.returncode == 0:
            digest.update(done.stdout)
            break
    return digest.hexdigest()[:20]


def _make_private(folder: Path) -> None:
    """Make the folder, and refuse one in which somebody else could put a library for us to load."""
    for part in (folder.parent.parent, folder.parent, folder):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(part)


def _check_private(path: Path) -> None:
    state = path.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"{path} belongs to or can be written by somebody else, so no library is loaded from it: "
            f"`chmod go-w` it, remove it, or set XDG_CACHE_HOME to a folder of your own"
        )
