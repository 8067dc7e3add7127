"""Multi-head latent attention (MLA): attention over the latents as they are cached."""

from .absorb import disable_absorb, enable_absorb
from .convert import LayerReport, MLAReport, convert_to_mla
from .four_bit import keep_trainable
from .heal import merge_healed, prepare_for_healing
from .module import LayerDims, MLAAttention
from .plan import MLAPlan, plan_mla

__all__ = [
    "LayerDims",
    "LayerReport",
    "MLAAttention",
    "MLAPlan",
    "MLAReport",
    "convert_to_mla",
    "disable_absorb",
    "enable_absorb",
    "keep_trainable",
    "merge_healed",
    "plan_mla",
    "prepare_for_healing",
]
