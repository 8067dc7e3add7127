"""Reuse of computed prefixes: across calls, threads, processes and machines, and in training."""

from .store import PrefixStore
from .training import prefix_training

__all__ = ["PrefixStore", "prefix_training"]
