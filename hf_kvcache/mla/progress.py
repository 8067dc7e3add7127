"""A progress bar for what may take minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SILENT = 2.0  # seconds before anything is shown

Advance = Callable[[str], None]
Tell = Callable[[str, int, int], None]  # (stage, done, total): how far something is


@contextmanager
def bar(wanted: bool | Tell, total: int, description: str) -> Iterator[Advance]:
    """Gives a function that counts one step and says what it was of.

    Shown on stderr where rich is installed, once two seconds are over; nothing is printed otherwise. `wanted` may be a
    function instead, which is told of every step.
    """
    if callable(wanted):
        done = 0

        def told(what: str) -> None:
            nonlocal done
            done += 1
            wanted(description.rstrip(":"), min(done, total), total)

        yield told
        return
    try:
        if not wanted:
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    task, began = shown.add_task(description, total=total), time.monotonic()

    def advance(what: str) -> None:
        shown.update(task, advance=1, description=f"{description} {what}")
        if time.monotonic() - began > _SILENT and not shown.live.is_started:
            shown.start()

    try:
        yield advance
    finally:
        if shown.live.is_started:  # stopping prints an empty line otherwise
            shown.stop()
