from .reference import quantize, quantize_pack

__all__ = ["quantize", "quantize_pack"]
