from .dispatch import column_sums

__all__ = ["column_sums"]
