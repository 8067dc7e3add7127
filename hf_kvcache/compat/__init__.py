"""Helpers for checking the package against every causal-LM architecture of the installed transformers."""
