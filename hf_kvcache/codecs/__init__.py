"""How blocks are written: one codec, one file."""

from .base import Codec, LayerCodec
from .float8 import Float8
from .kivi import KIVI
from .latent import Latent
from .presets import PRESETS, preset
from .rotated import Rotated

__all__ = ["KIVI", "PRESETS", "Codec", "Float8", "Latent", "LayerCodec", "Rotated", "preset"]
