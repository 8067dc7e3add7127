"""`hf-kvcache compat`: every cache on every causal-LM type of the installed transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..compat import run as checks
from .common import INTERRUPTED, Wrong, check_paths


def compat(
    types: Annotated[
        str | None, typer.Option(metavar="A,B", help="Model types (default: every causal-LM type).", show_default=False)
    ] = None,
    caches: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Of {', '.join(checks.CASES)} (default: all).", show_default=False),
    ] = None,
    attn: Annotated[str, typer.Option(metavar="NAME", help="Attention implementation: sdpa or eager.")] = "sdpa",
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the results as JSON.", show_default=False)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the table as a Markdown page.", show_default=False)
    ] = None,
) -> int:
    """Check every cache on every model type.

    Every causal-LM type of the installed transformers is built tiny and generates with every cache. Ends with 1 if
    something failed. Ctrl-C keeps what was checked so far.

    \b
    Example:
      hf-kvcache compat --types llama,gemma3_text --json compat.json
    """
    if attn not in ("sdpa", "eager"):
        raise Wrong(f"--attn must be sdpa or eager, got {attn!r}")
    check_paths(json, markdown)
    bad, whole = checks.check(_names(types), _names(caches), attn, json, markdown)
    return INTERRUPTED if not whole else 1 if bad else 0


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
