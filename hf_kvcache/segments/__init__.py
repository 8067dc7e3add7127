"""Where written tokens live."""

from .chain import Chain
from .dense import DenseSegment, Rows, capacity_for

__all__ = ["Chain", "DenseSegment", "Rows", "capacity_for"]
