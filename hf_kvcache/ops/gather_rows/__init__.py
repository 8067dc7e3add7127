from .dispatch import gather_rows

__all__ = ["gather_rows"]
