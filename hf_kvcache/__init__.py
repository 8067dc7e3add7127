"""hf_kvcache: key/value caches for Hugging Face transformers that hold fewer bytes and decode faster."""

from .attention import attach, detach
from .cache import KVCache, load
from .caches import CPUOffloadedCache, HeavyHitterCache, QuantizedKIVICache, SlidingWindowCache, SnapKVCache
from .offload import Offload

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadedCache",
    "HeavyHitterCache",
    "KVCache",
    "Offload",
    "QuantizedKIVICache",
    "SlidingWindowCache",
    "SnapKVCache",
    "attach",
    "detach",
    "load",
]
