"""The named presets, one file each."""

from .cross_layer import CrossLayerSharedCache
from .heavy_hitter import HeavyHitterCache
from .offloaded import CPUOffloadedCache
from .quantized import QuantizedKIVICache
from .sliding_window import SlidingWindowCache
from .snapkv import SnapKVCache

__all__ = [
    "CPUOffloadedCache",
    "CrossLayerSharedCache",
    "HeavyHitterCache",
    "QuantizedKIVICache",
    "SlidingWindowCache",
    "SnapKVCache",
]
