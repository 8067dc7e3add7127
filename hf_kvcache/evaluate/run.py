"""What the `eval` command measures unless told otherwise, and how it tells how far it is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# What is measured unless told otherwise: a small and a large setting of everything that has a name.
CACHES = (
    "kv",
    "float8",
    "kivi:nbits=4,num_sink_tokens=4",
    "kivi:nbits=2,num_sink_tokens=4",
    "rotated:nbits=4",
    "rotated:nbits=2",
    "snapkv:max_capacity_prompt=0.5",
    "snapkv:max_capacity_prompt=0.25",
    "h2o:heavy_ratio=0.25,recent_ratio=0.25",
    "window:window_length=0.5",
    "snapkv:max_capacity_prompt=0.5+kivi:nbits=4,num_sink_tokens=4",
)


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr if rich is installed and stderr is a terminal, else a line for each pass."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        rich = False
    else:
        rich = sys.stderr.isatty()
    if not rich:
        yield lambda done, total, what: print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
