"""Where written tokens live."""

from .chain import Chain
from .dense import DenseSegment, Rows, capacity_for
from .offloaded import OffloadedStore
from .offloaded_packed import OffloadedPackedStore
from .packed import PackedStore
from .ragged import Ragged

__all__ = [
    "Chain",
    "DenseSegment",
    "OffloadedPackedStore",
    "OffloadedStore",
    "PackedStore",
    "Ragged",
    "Rows",
    "capacity_for",
]
