"""The question a codec answers: how is a block of exact rows written?

A `Codec` is what the user chose; `for_layer` makes one `LayerCodec` for each layer: the formats of keys and values, and
the linear maps that are applied before. Invariants of every codec:

- The first `num_sink_tokens` rows and the last `residual_length` rows are bit-exact, always.
- A block is written once, from exact rows, when it leaves the exact window; codes are never decoded and coded again
  (except where a policy selects anew among rows of a codec that is not `per_token`).
- What is written for one batch row depends neither on the others nor on the padding before it.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..ops.packed import BITS, Format, codes_shape, scales_shape
from ..policies.base import check_not_negative, check_positive


@dataclass(frozen=True)
class LayerCodec:
    """How one layer writes its rows.

    Attributes:
        key_format, value_format: see `Format`.
        residual_length: newest rows that stay exact (tokens).
        num_sink_tokens: first rows that stay exact (tokens).
        centre_keys: take the mean of each key channel away, measured per sequence over the rows at hand when the first
            block is written; kept in float16.
        key_turn, value_turn: orthogonal `[D, D]` that rows are multiplied by before they are coded (None: none).
    """

    key_format: Format
    value_format: Format
    residual_length: int
    num_sink_tokens: int
    centre_keys: bool = False
    key_turn: torch.Tensor | None = None
    value_turn: torch.Tensor | None = None

    @property
    def per_token(self) -> bool:
        """Whether every row is complete in itself, so that rows can be moved and overwritten."""
        return self.key_format.per_token and self.value_format.per_token

    @property
    def block(self) -> int:
        """Rows that are written at once (tokens)."""
        size = 32
        for fmt in (self.key_format, self.value_format):
            if not fmt.per_token:
                size = math.lcm(size, fmt.group)
        return size

    def packed_after(self, rows: int) -> int:
        """Rows of `rows` that are packed, once the last block that can be is."""
        return max(0, (rows - self.num_sink_tokens - self.residual_length) // self.block * self.block)

    def packed_bytes(self, batch: int, heads: int, key_dim: int, value_dim: int, tiles: int, half: int) -> int:
        """Bytes of codes, scales, zeros and statistics with room for `tiles` tiles."""
        slots = tiles * 2 * half
        total = 0
        for fmt, dim, role in ((self.key_format, key_dim, "keys"), (self.value_format, value_dim, "values")):
            total += math.prod(codes_shape((batch, heads, slots, dim), fmt.bits, role, half))
            groups = math.prod(scales_shape(slots, dim, fmt))
            total += batch * heads * groups * (4 if fmt.has_zero else fmt.scale_bits // 8)
            total += batch * heads * 4 if fmt.scale_bits == 8 else 0
        if self.centre_keys:
            total += batch * heads * key_dim * 2
        return total

    def bits_per_element(self, key_dim: int, value_dim: int) -> float:
        """Mean over keys and values of a packed row: codes, scales and zeros."""
        keys, values = self.key_format.bits_per_element(), self.value_format.bits_per_element()
        return (keys * key_dim + values * value_dim) / (key_dim + value_dim)


class Codec:
    """Base of all codecs. Lossy beyond the exact window."""

    name = "codec"
    for_latents = False  # only for models with multi-head latent attention

    def __init__(self, residual_length: int, num_sink_tokens: int) -> None:
        check_not_negative("residual_length", residual_length)
        check_not_negative("num_sink_tokens", num_sink_tokens)
        self.residual_length = residual_length
        self.num_sink_tokens = num_sink_tokens

    @property
    def per_token(self) -> bool:
        """Whether every row is complete in itself (needed by policies that overwrite single rows)."""
        raise NotImplementedError

    def for_layer(self, layer: int, layers: int, key_dim: int, value_dim: int) -> LayerCodec:
        """The codec of layer `layer` of `layers`. Raises `ValueError` for sizes that it cannot write."""
        raise NotImplementedError

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.describe().items() if value is not None)
        return f"{type(self).__name__}({arguments})"

    def describe(self) -> dict[str, Any]:
        """The arguments, JSON-able, for `print(cache)` and for saved files."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}


class WidthCodec(Codec):
    """A codec with a width for keys and one for values: one for all layers, one for each, or a mean."""

    def __init__(
        self,
        nbits: float | list[int],
        key_bits: float | list[int] | None,
        value_bits: float | list[int] | None,
        residual_length: int,
        num_sink_tokens: int,
    ) -> None:
        super().__init__(residual_length, num_sink_tokens)
        check_bits("nbits", nbits)
        for name, value in (("key_bits", key_bits), ("value_bits", value_bits)):
            if value is not None:
                check_bits(name, value)
        self.nbits = nbits
        self.key_bits = key_bits
        self.value_bits = value_bits

    def widths(self, layer: int, layers: int) -> tuple[int, int]:
        """Bits of keys and of values in one layer."""
        own = [("key_bits", self.key_bits), ("value_bits", self.value_bits)]
        both = [("nbits", self.nbits) if value is None else (name, value) for name, value in own]
        return bits_at(*both[0], layer, layers), bits_at(*both[1], layer, layers)


def check_bits(name: str, value: Any) -> None:
    """A width, one for each layer, or a mean of two neighbouring widths."""
    if isinstance(value, float) and BITS[0] <= value <= BITS[-1]:
        return
    widths = value if isinstance(value, (list, tuple)) else [value]
    if not widths or any(isinstance(w, bool) or not isinstance(w, numbers.Integral) or w not in BITS for w in widths):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(str, BITS))}, a list of these, or a mean (a float from 2 to 8), "
            f"got {value!r}"
        )


def bits_at(name: str, value: Any, layer: int, layers: int) -> int:
    """The width of one layer. A mean of two widths is spread evenly over the layers, the larger one coming first."""
    if isinstance(value, float):
        low, high = next((a, b) for a, b in zip(BITS, BITS[1:], strict=False) if a <= value <= b)
        share = (value - low) / (high - low)
        return high if math.ceil((layer + 1) * share - 1e-9) > math.ceil(layer * share - 1e-9) else low
    if not isinstance(value, (list, tuple)):
        return int(value)
    if len(value) != layers:
        raise ValueError(f"`{name}` lists {len(value)} layers, but the model has {layers}")
    return int(value[layer])


def channel_group(dim: int, wanted: int) -> int:
    """Channels that share a scale: the divisor of `dim` nearest to `wanted`."""
    return min((n for n in range(1, dim + 1) if dim % n == 0), key=lambda n: (abs(n - wanted), -n))


def check_dim(dim: int, what: str) -> None:
    if dim % 4:
        raise ValueError(f"{what} of {dim} channels cannot be packed: the number must be a multiple of 4")


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def turn_of(dim: int, seed: int = 0) -> torch.Tensor:
    """A fixed orthogonal `[dim, dim]` that spreads every channel over all: a Hadamard matrix with random signs.

    Where `dim` is no power of two, the odd factor is a cosine transform. The same tensor for all layers and caches.
    """
    odd = dim
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while odd % 2 == 0:
        odd //= 2
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
    n = torch.arange(odd, dtype=torch.float64)
    cosine = torch.cos(math.pi / odd * (n[None, :] + 0.5) * n[:, None]) * math.sqrt(2 / odd)
    cosine[0] /= math.sqrt(2)
    mixed = torch.kron(hadamard / math.sqrt(hadamard.shape[0]), cosine)
    generator = torch.Generator().manual_seed(seed + 1)
    signs = torch.randint(0, 2, (2, dim), generator=generator).double() * 2 - 1
    return (signs[0, :, None] * mixed * signs[1]).float()


__all__ = [
    "Codec",
    "LayerCodec",
    "WidthCodec",
    "bits_at",
    "channel_group",
    "check_bits",
    "check_dim",
    "check_positive",
    "turn_of",
]
