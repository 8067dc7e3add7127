"""Codecs by name: points of the front between bits and fidelity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Codec
from .float8 import Float8
from .kivi import KIVI
from .latent import Latent
from .rotated import Rotated


def _rotated(key_bits: float, value_bits: float) -> Callable[..., Codec]:
    def make(**arguments: Any) -> Codec:
        return Rotated(**{"key_bits": key_bits, "value_bits": value_bits} | arguments)

    return make


def _latent(nbits: int) -> Callable[..., Codec]:
    def make(**arguments: Any) -> Codec:
        return Latent(**{"nbits": nbits} | arguments)

    return make


def _kivi(nbits: int) -> Callable[..., Codec]:
    def make(**arguments: Any) -> Codec:
        return KIVI(**{"nbits": nbits, "num_sink_tokens": 4} | arguments)

    return make


# Name -> a function of further arguments (`residual_length`, ...). Keys matter more than values, so they get the bits.
PRESETS: dict[str, Callable[..., Codec]] = {
    "rotated-4": _rotated(4, 4),
    "rotated-4-3": _rotated(4, 3),
    "rotated-4-2": _rotated(4, 2),
    "rotated-3-2": _rotated(3, 2),
    "rotated-2.5-2": _rotated(2.5, 2),
    "rotated-2": _rotated(2, 2),
    "kivi-8": _kivi(8),
    "kivi-4": _kivi(4),
    "kivi-2": _kivi(2),
    "float8": Float8,
    "latent-8": _latent(8),
    "latent-4": _latent(4),
}


def preset(name: str, **arguments: Any) -> Codec:
    """The codec of that name. Raises `ValueError`, listing the names, for any other."""
    if name not in PRESETS:
        raise ValueError(f"unknown codec {name!r}: one of {', '.join(PRESETS)}, or a hf_kvcache.codecs.Codec")
    return PRESETS[name](**arguments)
