"""The two halves of attention over packed rows on the CPU, in C++: optional, compiled on request.

Off unless asked for, by `enable()` or by HF_KVCACHE_NATIVE=1 in the environment (then at first use). Needs a C++17
compiler once; fast with AVX-512 (VNNI and VBMI: Ice Lake, Zen 4 and newer), right everywhere.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import lru_cache
from types import ModuleType

import torch

from ..packed import BITS, Format, Packed, code_rows, value_half
from .build import build

__all__ = ["active", "build", "disable", "enable", "enabled", "packed_logits", "packed_weighted", "supports"]

KINDS = ("affine", "symmetric", "codebook", "float8")
HALVES = (8, 16, 32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Products below this many are done on one thread: waking others takes longer.
SMALL = 1 << 21

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_off = False  # `disable()` was called: the environment asks no more


class Problem(ctypes.Structure):
    """Mirrors `Problem` in kernels.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "out", "codes", "scale", "zero")),
        ("table", POINTER(c_float)),
        *(
            (name, c_int64)
            for name in (
                "batch heads rows tokens dim bits half tile by_channel group float8 exact threads x_b x_h x_m "
                "codes_b codes_h codes_block codes_tile scale_b scale_h zero_b zero_h"
            ).split()
        ),
        ("centre", c_float),
    ]


def enable(flags: Sequence[str] | None = None) -> None:
    """Build the kernels if this machine has none yet, and use them from now on. `flags`: see `build`."""
    global _library, _off
    with _lock:
        library = ctypes.CDLL(str(build(flags=flags)))
        for name in ("kv_logits", "kv_weighted"):
            function = getattr(library, name)
            function.argtypes, function.restype = [POINTER(Problem)], None
        _library, _off = library, False


def disable() -> None:
    """Use them no more, whatever the environment says."""
    global _library, _off
    _library, _off = None, True


def enabled() -> bool:
    """Whether the kernels are in use, or will be at first use."""
    return _library is not None or (not _off and os.environ.get("HF_KVCACHE_NATIVE") == "1")


def active() -> ModuleType | None:
    """This module if the kernels are to be used, else None. Builds and loads them where only the environment asked."""
    if _library is None:
        if not enabled():
            return None
        enable()
    return sys.modules[__name__]


def supports(fmt: Format, dim: int, half: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these functions take rows of this kind (else: another way)."""
    fits = fmt.kind in KINDS and fmt.bits in BITS and dim > 0 and dim % 4 == 0 and half in HALVES
    if fmt.axis == "token":
        fits = fits and dim % fmt.group == 0
    if fmt.kind == "float8":
        fits = fits and fmt.bits == 8
    return fits and device.type == "cpu" and dtype in DTYPES


def packed_logits(query: torch.Tensor, keys: Packed, fmt: Format, length: int, half: int) -> torch.Tensor:
    """Products of queries `[B, H, M, D]` with the first `length` packed keys: float32 `[B, H, M, length]`.

    Queries of 16 bits lose nothing that their own rounding has not lost already; those of 32 bits are taken exactly.
    """
    _four(query, "query")
    b, h, m, d = query.shape
    _check(query, keys, fmt, d, length, half)
    tiles = -(-length // (2 * half))
    _shape(keys.codes, (b, h, tiles, code_rows(d, fmt.bits), half), 2, "codes of keys")
    out = torch.empty(b, h, m, length, dtype=torch.float32)
    x = query.detach().float()
    codes = _inner(keys.codes, 2)
    _call("kv_logits", x, codes, keys, fmt, out, (b, h, m, length, d), half, 2 * half, query.dtype == torch.float32)
    return out


def packed_weighted(
    probs: torch.Tensor, values: Packed, fmt: Format, dim: int, half: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Sums of packed values weighted by `probs` `[B, H, M, N]`: float32 `[B, H, M, dim]`.

    `dtype` is the model's: with one of 16 bits, probabilities are rounded to 16 bits of the largest among 64 tokens.
    """
    _four(probs, "probs")
    b, h, m, length = probs.shape
    _check(probs, values, fmt, dim, length, half)
    v = value_half(dim, half)
    tiles = -(-length // (2 * half))
    _shape(values.codes, (b, h, dim // (2 * v), tiles, code_rows(2 * half, fmt.bits), v), 3, "codes of values")
    out = torch.empty(b, h, m, dim, dtype=torch.float32)
    if length == 0:
        return out.zero_()
    codes = _inner(values.codes, 2)
    x = probs.detach().float()
    _call("kv_weighted", x, codes, values, fmt, out, (b, h, m, length, dim), v, 2 * half, dtype == torch.float32)
    return out


def _call(
    name: str,
    x: torch.Tensor,
    codes: torch.Tensor,
    packed: Packed,
    fmt: Format,
    out: torch.Tensor,
    sizes: tuple[int, int, int, int, int],
    half: int,
    tile: int,
    exact: bool,
) -> None:
    if _library is None:
        raise RuntimeError("the native CPU kernels are not loaded: call hf_kvcache.ops.native.enable() first")
    b, h, m, length, dim = sizes
    if out.numel() == 0:
        return
    if x.stride(3) != 1 and x.shape[3] != 1:
        x = x.contiguous()
    columns = dim if fmt.axis == "channel" else dim // fmt.group
    rows = -(-length // fmt.group) if fmt.axis == "channel" else length
    scale = _rows(packed.scale, rows, columns)
    zero = None if packed.zero is None else _rows(packed.zero, rows, columns)
    problem = Problem(
        x=x.data_ptr(),
        out=out.data_ptr(),
        codes=codes.data_ptr(),
        scale=scale.data_ptr(),
        zero=None if zero is None else zero.data_ptr(),
        table=_table(fmt),
        batch=b,
        heads=h,
        rows=m,
        tokens=length,
        dim=dim,
        bits=fmt.bits,
        half=half,
        tile=tile,
        by_channel=fmt.axis == "channel",
        group=fmt.group,
        float8=fmt.kind == "float8",
        exact=exact,
        threads=torch.get_num_threads() if b * h * m * length * dim >= SMALL else 1,
        x_b=x.stride(0),
        x_h=x.stride(1),
        x_m=x.stride(2),
        codes_b=codes.stride(0),
        codes_h=codes.stride(1),
        codes_block=codes.stride(2) if codes.ndim == 6 else 0,
        codes_tile=codes.stride(-3),
        scale_b=scale.stride(0),
        scale_h=scale.stride(1),
        zero_b=0 if zero is None else zero.stride(0),
        zero_h=0 if zero is None else zero.stride(1),
        centre=(2**fmt.bits - 1) / 2 if fmt.kind == "symmetric" else 0.0,
    )
    getattr(_library, name)(ctypes.byref(problem))


@lru_cache(maxsize=64)
def _table(fmt: Format) -> ctypes.Array[c_float] | None:
    """Level of each code of a codebook, for 16 or 256 codes."""
    if fmt.kind != "codebook":
        return None
    levels = list(fmt.levels or ())
    if len(levels) != 2**fmt.bits:
        raise ValueError(f"a codebook of {fmt.bits} bits has {2**fmt.bits} levels, not {len(levels)}")
    levels += levels[-1:] * (16 - len(levels))
    return (c_float * len(levels))(*levels)


def _four(x: torch.Tensor, name: str) -> None:
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, four dimensions are needed")


def _check(x: torch.Tensor, packed: Packed, fmt: Format, dim: int, length: int, half: int) -> None:
    """What must hold before memory is read by address."""
    if not supports(fmt, dim, half, x.dtype, x.device):
        raise ValueError(f"no native kernel for {fmt} at dim={dim}, half={half}, {x.dtype} on {x.device}")
    if length < 0:
        raise ValueError(f"length is {length}")
    if packed.codes.dtype != torch.uint8 or packed.codes.device.type != "cpu":
        raise ValueError(f"codes are {packed.codes.dtype} on {packed.codes.device}, uint8 on the CPU is needed")
    if (packed.zero is None) == fmt.has_zero:
        raise ValueError(f"format {fmt.kind} {'needs zeros' if fmt.has_zero else 'has no zeros'}")
    if fmt.axis == "channel":
        shape = (*x.shape[:2], -(-length // fmt.group), dim)
    else:
        shape = (*x.shape[:2], length, dim // fmt.group)
    for name, tensor in (("scale", packed.scale), ("zero", packed.zero)):
        if tensor is None:
            continue
        if tensor.dtype != torch.float16 or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, float16 on the CPU is needed")
        _shape(tensor, shape, 2, name)


def _shape(tensor: torch.Tensor, needed: tuple[int, ...], long: int, name: str) -> None:
    """The shape `needed`, where dimension `long` may be longer (room to grow)."""
    shape = tuple(tensor.shape)
    if len(shape) == len(needed) and shape[long] >= needed[long]:
        if shape[:long] + shape[long + 1 :] == needed[:long] + needed[long + 1 :]:
            return
    raise ValueError(f"{name} have shape {shape}, {needed} is needed (dimension {long} may be longer)")


def _inner(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The tensor, or a copy where its last dimensions do not lie next to each other."""
    step = 1
    for dim in range(1, dims + 1):
        if tensor.shape[-dim] != 1 and tensor.stride(-dim) != step:
            return tensor.contiguous()
        step *= tensor.shape[-dim]
    return tensor


def _rows(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales or zeros `[B, H, rows, columns]` whose rows lie next to each other."""
    tensor = tensor[:, :, :rows]
    return _inner(tensor, 2) if columns == tensor.shape[3] else tensor.contiguous()
