"""Tensor operations, each with a plain-torch reference that a reader can check by eye."""
