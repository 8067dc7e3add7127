from .reference import Block, Extras, attend, masked_logits, merge, probabilities

__all__ = ["Block", "Extras", "attend", "masked_logits", "merge", "probabilities"]
