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
from .gqa import convert_to_gqa
from .mla import (
    capture_layers,
    convert_to_mla,
    disable_absorb,
    distill_layers,
    enable_absorb,
    export_deepseek_v3,
    merge_healed,
    plan_mla,
    prepare_for_healing,
)
from .offload import Offload
from .paging import BlockPool
from .prefix import PrefixStore, prefix_training
from .sharing import Sharing, find_sharing
from .sizing import estimate
from .specs import CacheSpec, SpecError, from_spec, parse_spec

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "CPUOffloadedCache",
    "CacheSpec",
    "CrossLayerSharedCache",
    "HeavyHitterCache",
    "KVCache",
    "Offload",
    "PrefixStore",
    "QuantizedKIVICache",
    "Sharing",
    "SlidingWindowCache",
    "SnapKVCache",
    "SpecError",
    "attach",
    "capture_layers",
    "convert_to_gqa",
    "convert_to_mla",
    "detach",
    "disable_absorb",
    "distill_layers",
    "enable_absorb",
    "estimate",
    "export_deepseek_v3",
    "find_sharing",
    "from_spec",
    "load",
    "merge_healed",
    "parse_spec",
    "plan_mla",
    "prefix_training",
    "prepare_for_healing",
]
