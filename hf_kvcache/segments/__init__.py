"""Where written tokens live."""

from .chain import Chain
from .dense import DenseSegment, Rows, capacity_for
from .packed import PackedStore
from .paged import PagedSegment
from .ragged import Ragged
from .sealed import PackedChain

__all__ = ["Chain", "DenseSegment", "PackedChain", "PackedStore", "PagedSegment", "Ragged", "Rows", "capacity_for"]
