"""Paged storage: caches that draw fixed-size blocks from one pool and share them copy-on-write."""

from .pool import BlockPool

__all__ = ["BlockPool"]
