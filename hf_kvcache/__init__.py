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
from .mla import capture_layers, convert_to_mla, disable_absorb, distill_layers, enable_absorb, plan_mla
from .offload import Offload
from .paging import BlockPool
from .prefix import PrefixStore, prefix_training
from .sharing import Sharing, find_sharing

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "CPUOffloadedCache",
    "CrossLayerSharedCache",
    "HeavyHitterCache",
    "KVCache",
    "Offload",
    "PrefixStore",
    "QuantizedKIVICache",
    "Sharing",
    "SlidingWindowCache",
    "SnapKVCache",
    "attach",
    "capture_layers",
    "convert_to_mla",
    "detach",
    "disable_absorb",
    "distill_layers",
    "enable_absorb",
    "find_sharing",
    "load",
    "plan_mla",
    "prefix_training",
]
