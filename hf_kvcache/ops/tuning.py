"""How the Triton kernels are launched on each GPU: a table that is read, never a search at run time."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .tuning_table import TABLE


class Entry(NamedTuple):
    """Launch parameters of decode attention."""

    num_warps: int
    num_stages: int
    programs: int  # to aim for on the whole GPU
    min_tiles: int  # tiles of 64 tokens that a split has at least
    max_splits: int
    block_n: int  # exact rows of one step


@lru_cache(maxsize=64)
def target_of(device: torch.device) -> str:
    """The table's name for a GPU: the newest generation in it that is not newer than the GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    known = sorted(int(name.removeprefix("sm_")) for name in TABLE)
    return f"sm_{max([n for n in known if n <= 10 * major + minor] or known[:1])}"


@lru_cache(maxsize=256)
def lookup(target: str, bits: int, dim: int) -> Entry:
    """The entry of the smallest listed head size that is not below `dim`."""
    sizes = sorted(int(key.split("x")[1]) for key in TABLE[target] if key.startswith(f"{bits}x"))
    size = next((s for s in sizes if s >= dim), sizes[-1])
    return Entry(*TABLE[target][f"{bits}x{size}"])


def split_count(entry: Entry, tiles: int, programs: int) -> int:
    """Splits of `tiles` tiles where `programs` programs (batch rows, heads, chunks of queries) work on each split."""
    wanted = -(-entry.programs // programs)
    return max(1, min(wanted, tiles // entry.min_tiles, entry.max_splits))
