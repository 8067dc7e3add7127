"""hf_kvcache: key/value caches for Hugging Face transformers that hold fewer bytes and decode faster."""

from .attention import attach, detach
from .cache import KVCache, load
from .caches import HeavyHitterCache, QuantizedKIVICache, SlidingWindowCache, SnapKVCache
from .mla import convert_to_mla, disable_absorb, enable_absorb, plan_mla

__version__ = "0.1.0"

__all__ = [
    "HeavyHitterCache",
    "KVCache",
    "QuantizedKIVICache",
    "SlidingWindowCache",
    "SnapKVCache",
    "attach",
    "convert_to_mla",
    "detach",
    "disable_absorb",
    "enable_absorb",
    "load",
    "plan_mla",
]
