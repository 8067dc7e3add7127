"""Bytes before anything is loaded: what each technique would hold for a model that is known by its config."""

from .presets import PRESETS, preset_config
from .sizes import LayerSizes, ModelSizes, load_config, measure_sizes
from .table import SPECS, Estimate, Row, Sized, estimate
from .units import read_bytes, read_dtype, show_bytes, show_count

__all__ = [
    "PRESETS",
    "SPECS",
    "Estimate",
    "LayerSizes",
    "ModelSizes",
    "Row",
    "Sized",
    "estimate",
    "load_config",
    "measure_sizes",
    "preset_config",
    "read_bytes",
    "read_dtype",
    "show_bytes",
    "show_count",
]
