"""hf_kvcache: key/value caches for Hugging Face transformers that hold fewer bytes and decode faster."""

from .attention import attach, detach
from .cache import KVCache, load
from .caches import HeavyHitterCache, QuantizedKIVICache, SlidingWindowCache, SnapKVCache
from .prefix import PrefixStore, prefix_training

__version__ = "0.1.0"

__all__ = [
    "HeavyHitterCache",
    "KVCache",
    "PrefixStore",
    "QuantizedKIVICache",
    "SlidingWindowCache",
    "SnapKVCache",
    "attach",
    "detach",
    "load",
    "prefix_training",
]
