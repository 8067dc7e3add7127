from .dispatch import quantize_pack
from .reference import quantize

__all__ = ["quantize", "quantize_pack"]
