"""Multi-head latent attention (MLA): attention over the latents as they are cached."""

from .absorb import disable_absorb, enable_absorb
from .captured import capture_layers
from .convert import LayerReport, MLAReport, convert_to_mla
from .distill import DistilledLayer, DistillReport, distill_layers
from .export import ExportReport, export_deepseek_v3
from .four_bit import keep_trainable
from .heal import merge_healed, prepare_for_healing
from .module import LayerDims, MLAAttention
from .plan import MLAPlan, plan_mla

__all__ = [
    "DistillReport",
    "DistilledLayer",
    "ExportReport",
    "LayerDims",
    "LayerReport",
    "MLAAttention",
    "MLAPlan",
    "MLAReport",
    "capture_layers",
    "convert_to_mla",
    "disable_absorb",
    "distill_layers",
    "enable_absorb",
    "export_deepseek_v3",
    "keep_trainable",
    "merge_healed",
    "plan_mla",
    "prepare_for_healing",
]
