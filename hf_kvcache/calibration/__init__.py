"""Which layers need the bits: widths of keys and values, layer by layer, measured on a text of yours."""

from .calibrate import Calibration, allot, calibrate

__all__ = ["Calibration", "allot", "calibrate"]
