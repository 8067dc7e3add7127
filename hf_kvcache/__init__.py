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
from .mla import convert_to_mla, disable_absorb, enable_absorb, merge_healed, plan_mla, prepare_for_healing
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
    "convert_to_mla",
    "detach",
    "disable_absorb",
    "enable_absorb",
    "find_sharing",
    "load",
    "merge_healed",
    "plan_mla",
    "prepare_for_healing",
    "prefix_training",
]
