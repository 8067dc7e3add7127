"""Grouped-query attention (GQA): the same model with fewer KV heads."""

from .convert import GQALayerReport, GQAReport, convert_to_gqa

__all__ = ["GQALayerReport", "GQAReport", "convert_to_gqa"]
