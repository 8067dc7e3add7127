"""What a cache costs in fidelity: its predictions against the full cache's, beside the bytes that it saves."""

from .measure import evaluate
from .specs import Spec, build, codecs, parse, policies
from .texts import TEXTS

__all__ = ["TEXTS", "Spec", "build", "codecs", "evaluate", "parse", "policies"]
