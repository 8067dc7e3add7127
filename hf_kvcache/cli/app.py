"""The command and its subcommands, and what becomes of errors: one line and exit code 2."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

from .. import __version__
from .bench import bench
from .chat import chat
from .common import INTERRUPTED, Several, Wrong, one_line
from .compat import compat
from .convert_mla import convert_mla
from .estimate import estimate
from .evaluate import evaluate
from .recommend import recommend

NAME = "hf-kvcache"
app = typer.Typer(name=NAME, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def top(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors (anywhere on the line).")] = False,
) -> None:
    """Smaller KV caches for Hugging Face transformers: what they cost, which to take, how fast they are."""
    if version:
        print(__version__)
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise Wrong("name a command, as in `hf-kvcache estimate llama-3-8b --context 8192`")


app.command(cls=Several)(estimate)
app.command(cls=Several)(recommend)
app.command(cls=Several)(bench)
app.command(cls=Several)(chat)
app.command("eval", cls=Several)(evaluate)
app.command(cls=Several)(compat)
app.command(cls=Several)(convert_mla)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0; 1 where a check failed or something broke; 130 after Ctrl-C.

    Bad input ends with `SystemExit(2)`, after one line that names the fix.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        code: Any = typer.main.get_command(app).main(args=words, prog_name=NAME, standalone_mode=False)
        if code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        return int(code or 0)
    except (Wrong, ValueError, NotImplementedError, ImportError, OSError) as error:
        if debug:
            traceback.print_exc()
        return _fail(one_line(error))
    except Exception as error:
        message = getattr(error, "format_message", None)  # wrong options, as typer reports them
        if message is not None:
            command = getattr(getattr(error, "ctx", None), "command_path", NAME)
            return _fail(f"{' '.join(message().split())} (see `{command} --help`)")
        if debug:
            traceback.print_exc()
        hint = "" if debug else "; --debug shows where, and a report of it is welcome"
        print(f"error: unexpected {type(error).__name__}: {one_line(error, 300)}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
