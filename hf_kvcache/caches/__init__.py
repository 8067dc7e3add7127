"""The named presets, one file each."""

from .heavy_hitter import HeavyHitterCache
from .offloaded import CPUOffloadedCache
from .quantized import QuantizedKIVICache
from .sliding_window import SlidingWindowCache
from .snapkv import SnapKVCache

__all__ = ["CPUOffloadedCache", "HeavyHitterCache", "QuantizedKIVICache", "SlidingWindowCache", "SnapKVCache"]
