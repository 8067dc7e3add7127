"""Where written tokens live."""

from .dense import DenseSegment, Rows, capacity_for

__all__ = ["DenseSegment", "Rows", "capacity_for"]
