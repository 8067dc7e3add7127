"""Keep everything. On a sliding or chunked layer: everything that a later query can still see. Lossless."""

from __future__ import annotations

from ..segments import capacity_for
from .base import LayerPolicy


class KeepAllLayer(LayerPolicy):
    """The identity policy; it proves the layer before any clever one exists."""

    def __init__(self, window: int | None = None) -> None:
        self.window = window

    def rows_after(self, tokens: int) -> int:
        if self.window is not None and tokens >= self.window + max(self.window, 32):
            return self.window
        return capacity_for(tokens)
