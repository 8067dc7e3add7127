"""Multi-head latent attention (MLA): attention over the latents as they are cached."""

from .absorb import disable_absorb, enable_absorb

__all__ = ["disable_absorb", "enable_absorb"]
