"""`python -m hf_kvcache`, which is `hf-kvcache`: one subcommand for each thing that is asked without writing code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_NEEDED = ("typer", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; bad input ends with 2."""
    try:
        from .cli.app import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        print(f'error: the commands need {error.name}: pip install "hf-kvcache[cli]"', file=sys.stderr)
        return 2
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
