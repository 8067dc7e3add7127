"""What the subcommands share: errors of one line, options that take several words, loading, JSON, tables."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
import typer.core
from rich.console import Console
from rich.table import Table

from ..sizing.presets import PRESETS
from ..sizing.units import known_device, read_dtype
from ..specs import SpecError, parse_spec

INTERRUPTED = 130  # as a shell reports Ctrl-C

# Options that several subcommands have.
GgufFile = Annotated[
    str | None, typer.Option(metavar="F", help="The GGUF file of that model to load.", show_default=False)
]
Attention = Annotated[str, typer.Option(metavar="NAME", help="Attention implementation.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="Where the model runs.")]
ThreadCount = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="CPU threads.", show_default="torch's own choice")
]


class Wrong(Exception):
    """Bad input: one line that names the fix. Ends the command with 2."""


def one_line(error: BaseException, most: int = 600) -> str:
    """The message of an error without its line breaks; a spec's error keeps the line that points at the token."""
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


def note(text: str) -> None:
    """A remark beside the result, on standard error."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def quiet() -> None:
    """No bars of transformers' own where standard error is no terminal."""
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()


def check_paths(*paths: Path | None, picture: Path | None = None) -> None:
    """Raise `Wrong` where a file could not be written later, or where a `picture` is called something else than PNG."""
    for path in (*paths, picture):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise Wrong(f"{path.parent} is no folder")
        if path.is_dir():
            raise Wrong(f"{path} is a folder: name a file in it")
    if picture is not None and picture.suffix.lower() != ".png":
        raise Wrong(f"pictures are PNG files, so {picture} must end in .png")


def check_caches(specs: Sequence[str], lengths: Sequence[int], option: str, default: bool) -> None:
    """Raise for caches that prompts of these lengths cannot have. With `default` nobody typed them: the option is named
    that is to blame, not an argument of a spec."""
    for spec in specs:
        parsed = parse_spec(spec)
        for tokens in lengths:
            try:
                parsed.check(tokens)
            except SpecError as error:
                if not default:
                    raise
                raise Wrong(
                    f"{option} {tokens} is too short for {spec}, one of the default caches: give a longer {option}, "
                    "or --caches of your own"
                ) from error


def learned_positions(model: Any) -> int | None:
    """How many positions the model has learned a vector for, beyond which it cannot read; None where it turns keys or
    biases attention, which goes on for any length."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(limit, int) or any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        return None
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        # Some tables have a few rows more, for padding.
        if isinstance(module, torch.nn.Embedding) and ("pos" in leaf or leaf == "wpe"):
            return limit if module.num_embeddings >= limit else None
    return None


def check_length(model: Any, tokens: int, option: str) -> None:
    """Raise `Wrong` where the model has no positions for so many tokens."""
    limit = learned_positions(model)
    if limit is not None and tokens > limit:
        raise Wrong(
            f"{option} come to {tokens:,} tokens, and this model has learned positions for {limit:,} "
            "(max_position_embeddings): ask for fewer"
        )


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


def check_device(name: str) -> None:
    """Raise `Wrong` for devices that this machine, or this build of torch, does not have."""
    try:
        known_device(name)
    except ValueError as error:
        raise Wrong(f"--device {error}") from error


def load(
    model: str,
    dtype: str = "float32",
    attention: str = "sdpa",
    device: str = "cpu",
    gguf_file: str | None = None,
) -> tuple[Any, Any]:
    """Model and tokenizer. Raises `Wrong` where they cannot be had."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if model.lower() in PRESETS and not os.path.exists(model):
        raise Wrong(f"{model} is a preset of sizes, for estimates: a preset has no weights; give a Hub id or a folder")
    check_device(device)
    source = {} if gguf_file is None else {"gguf_file": gguf_file}
    transformers.logging.set_verbosity_error()
    quiet()
    try:
        chosen = read_dtype(dtype)
        tokenizer = AutoTokenizer.from_pretrained(model, **source)
        made = AutoModelForCausalLM.from_pretrained(model, dtype=chosen, attn_implementation=attention, **source)
        return made.eval().to(device), tokenizer
    except Exception as error:  # whatever the code of a model raises for a config or a file that does not fit it
        if attention != "eager" and "attn_implementation" in str(error):
            raise Wrong(f"{model} does not support {attention} attention: give --attention eager") from error
        raise Wrong(f"{model} cannot be loaded: {one_line(error, 300)}") from error


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """Columns of text on the left, everything else on the right."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
