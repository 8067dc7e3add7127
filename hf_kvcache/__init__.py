"""hf_kvcache: key/value caches for Hugging Face transformers that hold fewer bytes and decode faster."""

from .attention import attach, detach
from .cache import KVCache, load
from .caches import (
    CPUOffloadedCache,
    CrossLayerSharedCache,
    HeavyHitterCache,
    QuantizedKIVICache,
    SlidingWindowCache,
    SnapKVCache,
)
from .mla import disable_absorb, enable_absorb
from .offload import Offload
from .paging import BlockPool
from .prefix import PrefixStore, prefix_training
from .sharing import Sharing, find_sharing

__version__ = "0.1.0"

__all__ = [
    "CrossLayerSharedCache",
    "BlockPool",
    "HeavyHitterCache",
    "KVCache",
    "PrefixStore",
    "CPUOffloadedCache",
    "Offload",
    "QuantizedKIVICache",
    "Sharing",
    "SlidingWindowCache",
    "SnapKVCache",
    "attach",
    "detach",
    "find_sharing",
    "disable_absorb",
    "enable_absorb",
    "load",
    "prefix_training",
]
