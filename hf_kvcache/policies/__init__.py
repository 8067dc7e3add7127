"""Which tokens stay: one technique, one file."""

from .base import Keep, LayerPolicy, Policy, Step, first_tokens, select
from .heavy_hitter import HeavyHitter
from .snapkv import SnapKV
from .window import SlidingWindow

__all__ = ["HeavyHitter", "Keep", "LayerPolicy", "Policy", "SlidingWindow", "SnapKV", "Step", "first_tokens", "select"]
