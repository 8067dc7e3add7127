"""The contract of every cache, as one matrix (see `common.py` for the axes)."""
