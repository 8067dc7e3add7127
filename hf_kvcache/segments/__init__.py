"""Where written tokens live."""

from .chain import Chain
from .dense import DenseSegment, Rows, capacity_for
from .packed import PackedStore
from .ragged import Ragged

__all__ = ["Chain", "DenseSegment", "PackedStore", "Ragged", "Rows", "capacity_for"]
