from .dispatch import Part, latent_attention

__all__ = ["Part", "latent_attention"]
