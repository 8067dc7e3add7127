"""`python -m hf_kvcache`: one subcommand for each thing that can be asked without writing code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The command line. A subcommand brings its own arguments and sets `run` to a function of the parsed ones."""
    from .compat import run as compat
    from .evaluate import run as evaluate

    top = argparse.ArgumentParser(prog="python -m hf_kvcache", description="KV caches for Hugging Face transformers.")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    about = "check every cache on every causal-LM model type of the installed transformers"
    compat.add_arguments(commands.add_parser("compat", help=about, description=about))
    about = "measure how far the predictions with a cache are from the full cache's, and how small it is"
    evaluate.add_arguments(commands.add_parser("eval", help=about, description=about))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; wrong arguments end with 2."""
    arguments = parser().parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
