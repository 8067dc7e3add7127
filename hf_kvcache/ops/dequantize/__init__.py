from .dispatch import dequantize
from .reference import levels

__all__ = ["dequantize", "levels"]
