"""What the subcommands share: errors of one line, options that take several words, loading, JSON, tables."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import typer.core
from rich.console import Console
from rich.table import Table

from ..sizing.units import read_dtype

INTERRUPTED = 130  # as a shell reports Ctrl-C


class Wrong(Exception):
    """Bad input: one line that names the fix. Ends the command with 2."""


def one_line(error: BaseException, most: int = 600) -> str:
    """The message of an error without its line breaks; a spec's error keeps the line that points at the token."""
    from ..specs import SpecError

    if isinstance(error, SpecError):
        return str(error)
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= most else words[: most - 3] + "..."


class Several(typer.core.TyperCommand):
    """A command whose list options take several words: `--caches A B C` is `--caches A --caches B --caches C`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        flags = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        out: list[str] = []
        current: str | None = None
        fresh = False
        for word in args:
            option, given, _ = word.partition("=")
            if option in flags or word == "--":
                current, fresh = (option, not given) if option in lists else (None, False)
                out.append(word)
            elif current is not None and not fresh:
                out += [current, word]
            else:
                out.append(word)
                fresh = False
        return super().parse_args(ctx, out)


def say(text: str = "") -> None:
    """A line of standard output, as it is: no markup, no wrapping."""
    print(text, flush=True)


def show(table: Table) -> None:
    """A table on standard output. Where that is no terminal, as wide as it needs to be."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 400, highlight=False)
    console.print(table)


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr that appears after a second, and only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)
    timer = threading.Timer(1, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def check_paths(*paths: Path | None) -> None:
    """Raise `Wrong` where a file could not be written later."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise Wrong(f"{path.parent} is no folder")


def write_json(path: Path | None, content: Any) -> None:
    """Whole or not at all; `-` is standard output."""
    if path is None:
        return
    text = json.dumps(content, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def threads(count: int | None) -> None:
    """Set the CPU threads of torch, if asked to."""
    if count is None:
        return
    if count < 1:
        raise Wrong(f"--threads must be at least 1, got {count}")
    torch.set_num_threads(count)


def load(
    model: str,
    dtype: str = "float32",
    attention: str = "sdpa",
    device: str = "cpu",
    gguf_file: str | None = None,
) -> tuple[Any, Any]:
    """Model and tokenizer. Raises `Wrong` where they cannot be had."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {} if gguf_file is None else {"gguf_file": gguf_file}
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        chosen = read_dtype(dtype)
        tokenizer = AutoTokenizer.from_pretrained(model, **source)
        made = AutoModelForCausalLM.from_pretrained(model, dtype=chosen, attn_implementation=attention, **source)
        return made.eval().to(device), tokenizer
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise Wrong(f"{model} cannot be loaded: {one_line(error, 300)}") from error


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """Columns of text on the left, everything else on the right."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
