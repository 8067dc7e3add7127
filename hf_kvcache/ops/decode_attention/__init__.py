from .dispatch import PackedRows, decode_attention, packed_logits, packed_weighted

__all__ = ["PackedRows", "decode_attention", "packed_logits", "packed_weighted"]
