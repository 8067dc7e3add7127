from .reference import dequantize, levels

__all__ = ["dequantize", "levels"]
