"""The question sharing answers: which layers read whose rows?"""

from .find import Sharing, find_sharing
from .follower import FollowerLayer
from .groups import layer_kinds, resolve

__all__ = ["FollowerLayer", "Sharing", "find_sharing", "layer_kinds", "resolve"]
