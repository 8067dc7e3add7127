"""Tables of what `evaluate` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def windows_of(result: Mapping[str, Any]) -> str:
    """Which windows of which texts."""
    count, texts = result["arguments"]["windows"], result["arguments"]["texts"]
    return f"{count} window{'s' if count > 1 else ''} of {' and '.join(texts)}"


def headline(result: Mapping[str, Any]) -> str:
    """What was measured on what, and the figures of the full cache, in one line."""
    asked, model, full = result["arguments"], result["model"], result["full"]
    line = (
        f"{model['name']}, {model['dtype']}, prompts of {asked['prompt']:,} tokens + {asked['tokens']}, "
        f"{windows_of(result)}: full perplexity {full['perplexity']:.2f}"
    )
    if asked["needles"]:
        line += f", the full cache finds {full['found']} of {asked['needles']} codes"
    if "interrupted" in result:
        part = result["interrupted"]
        line += f" (interrupted: {part['windows_done']} of {part['windows']} windows were done)"
    return line


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The table, head first. KL in nats; bytes as shares of the full cache's, after the prompt / at the end."""
    texts = result["arguments"]["texts"]
    several = texts if len(texts) > 1 else []
    head = ["cache", "bits/element", "KL", *(f"KL {name}" for name in several), "perplexity", "top-1", "bytes"]
    needles = result["arguments"]["needles"]
    table = [[*head, "codes found"] if needles else head]
    for cache in result["caches"]:
        row = [cache["spec"], f"{cache['bits_per_element']:.2f}", _kl(cache["kl"])]
        row += [_kl(cache["by_text"][name]["kl"]) for name in several]
        row += [f"{cache['perplexity']:.2f}", f"{cache['top1']:.2f}"]
        row += [f"{cache['bytes_after_prompt']:.3f} / {cache['bytes_at_end']:.3f}"]
        row += [f"{cache['found']}/{result['full']['found']}"] if needles else []
        table.append(row)
    return table


def _kl(value: float) -> str:
    """Three significant digits; what is below a millionth is rounding."""
    if value < 1e-6:
        return "0"
    return f"{value:.4f}" if value >= 0.001 else f"{value:.2g}"


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table whose first column is code."""
    lines = [list(table[0]), ["---"] * len(table[0])] + [[f"`{row[0]}`", *row[1:]] for row in table[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(table: Sequence[Sequence[str]]) -> str:
    """A table in columns, for a terminal."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)
