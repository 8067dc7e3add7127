"""Where written tokens live."""

from .chain import Chain
from .dense import DenseSegment, Rows, capacity_for
from .offloaded import OffloadedStore
from .offloaded_packed import OffloadedPackedStore
from .packed import PackedStore
from .paged import PagedSegment
from .ragged import Ragged
from .sealed import PackedChain

__all__ = [
    "Chain",
    "DenseSegment",
    "OffloadedPackedStore",
    "OffloadedStore",
    "PackedChain",
    "PackedStore",
    "PagedSegment",
    "Ragged",
    "Rows",
    "capacity_for",
]
