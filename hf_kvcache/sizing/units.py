"""Sizes of memory as people type and read them."""

from __future__ import annotations

import re

import torch

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LEAST_PLAIN = 10**6  # a number without a unit below this was meant as gigabytes, most likely
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def read_bytes(text: str) -> int:
    """`"80GB"` (10^9), `"80GiB"` (2^30) or a plain number of bytes. Raises `ValueError` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)(B?))\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is no size of memory: write it as 80GB (10^9 bytes), 80GiB (2^30) or a number")
    unit = found[2].upper()
    size = int(float(found[1]) * (_BINARY[unit] if found[3] else _UNITS[unit]))
    if 0 < size < LEAST_PLAIN and not found[2] and not found[4]:
        raise ValueError(f"{text!r} would be {size} bytes of memory: give the unit, as {text.strip()}GB")
    if size <= 0:
        raise ValueError(f"{text!r} is no memory at all: give what the device has, as 24GB")
    return size


def show_bytes(size: float, binary: bool = False) -> str:
    """Three significant digits and a unit: `1.07 GB`, or with `binary` `1.00 GiB`."""
    base, suffix = (1024, "iB") if binary else (1000, "B")
    for unit in ("", "K", "M", "G", "T"):
        if abs(size) < 999.5 or unit == "T":
            break
        size /= base
    if not unit:
        return f"{size:.0f} B"
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{digits}f} {unit}{suffix}"


def show_count(count: int | None) -> str:
    """A whole number with commas; None is "any"."""
    return "any" if count is None else f"{count:,}"


def read_dtype(text: str) -> torch.dtype:
    """A dtype by its name. Raises `ValueError`."""
    if text not in DTYPES:
        raise ValueError(f"unknown dtype {text!r}: one of {', '.join(DTYPES)}")
    return DTYPES[text]


def known_device(name: str) -> torch.device:
    """The device, if this machine and this build of torch have it. Raises `ValueError`."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name}: torch knows no such device; cpu, cuda or cuda:0 are some") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"{name}: this torch sees no CUDA device; give --device cpu (`device='cpu'`), or install one built for it"
        )
    return device
