"""What a cache costs in fidelity: its predictions against the full cache's, beside the bytes that it saves."""

from .measure import evaluate
from .texts import TEXTS

__all__ = ["TEXTS", "evaluate"]
