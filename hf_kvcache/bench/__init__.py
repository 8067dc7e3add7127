"""Time: what a decoding step costs with each cache, all of them interleaved in one run."""

from .decode import WARM_UP, decode_times, prefill, step, summary

__all__ = ["WARM_UP", "decode_times", "prefill", "step", "summary"]
