"""Time: what a decoding step costs with each cache, all of them interleaved in one run."""

from .decode import decode_times, prefill, step, summary

__all__ = ["decode_times", "prefill", "step", "summary"]
