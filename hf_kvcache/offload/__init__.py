"""Rows that live beyond the compute device: in host memory, and in files."""

from .config import Offload
from .transfer import Offloader

__all__ = ["Offload", "Offloader"]
