from .reference import Block, Extras, attend, finished_logits, log_sum_exp, masked_logits, merge, probabilities

__all__ = [
    "Block",
    "Extras",
    "attend",
    "finished_logits",
    "log_sum_exp",
    "masked_logits",
    "merge",
    "probabilities",
]
