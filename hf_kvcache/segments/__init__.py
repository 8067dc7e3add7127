"""Where written tokens live."""

from .chain import Chain
from .dense import DenseSegment, Rows, capacity_for
from .ragged import Ragged

__all__ = ["Chain", "DenseSegment", "Ragged", "Rows", "capacity_for"]
