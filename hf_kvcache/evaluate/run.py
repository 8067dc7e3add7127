"""`python -m hf_kvcache eval`: how faithful caches are on a model of yours, and how small."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from . import plot
from .measure import evaluate
from .report import headline, markdown, plain, rows
from .specs import codecs, parse, policies
from .texts import TEXTS, read

DTYPES = ("float32", "bfloat16", "float16")
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m hf_kvcache eval`."""
    known = f"policies {', '.join(policies())} and codecs {', '.join(codecs())}, joined with +, arguments after a colon"
    parser.add_argument("--model", required=True, help="a Hub id or a folder")
    parser.add_argument("--gguf-file", metavar="F", help="the GGUF file of that model to load")
    parser.add_argument(
        "--text", nargs="+", default=["topics"], metavar="T", help=f"files, or texts of Python: {', '.join(TEXTS)}"
    )
    parser.add_argument("--caches", nargs="+", default=list(CACHES), metavar="SPEC", help=known)
    parser.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens read in one call (default 1024)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens fed one at a time (default 64)")
    parser.add_argument("--windows", type=int, default=4, metavar="N", help="windows of each text (default 4)")
    parser.add_argument("--needles", type=int, default=0, metavar="N", help="prompts with a planted code (default 0)")
    parser.add_argument(
        "--shared-prompt", action="store_true", help="caches that keep every token share one prompt pass"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model (default float32)")
    parser.add_argument("--attention", default="sdpa", metavar="NAME", help="attention implementation (default sdpa)")
    parser.add_argument("--device", default="cpu", help="where the model runs (default cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw KL over size as a PNG")
    parser.add_argument("--plot-x", choices=list(plot.X_AXES), default="bits", help="size in the plot (default bits)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=command, parser=parser)


def command(arguments: argparse.Namespace) -> int:
    """Measure as asked and print the table. Wrong arguments end with 2, before a model is loaded where possible."""
    fail = arguments.parser.error
    try:
        for spec in arguments.caches:
            parse(spec).check(arguments.prompt)
        texts = {name: read(name) for name in arguments.text}
        if arguments.plot is not None:
            plot.require()
    except (ValueError, ImportError) as error:
        fail(str(error))
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.parent.is_dir():
            fail(f"{path.parent} is no folder")
    if arguments.threads is not None:
        if arguments.threads < 1:
            fail(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    try:
        model, tokenizer = _load(arguments)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        fail(f"{arguments.model} cannot be loaded: {error}")
    try:
        with show_progress() as progress:
            result = evaluate(
                model,
                tokenizer,
                texts,
                arguments.caches,
                prompt=arguments.prompt,
                tokens=arguments.tokens,
                windows=arguments.windows,
                needles=arguments.needles,
                shared_prompt=arguments.shared_prompt,
                progress=progress,
            )
    except (ValueError, NotImplementedError) as error:
        fail(str(error))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        plot.pareto(result, arguments.plot, arguments.plot_x)
    print(headline(result))
    print()
    print((markdown if arguments.markdown else plain)(rows(result)))
    return 0


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {} if arguments.gguf_file is None else {"gguf_file": arguments.gguf_file}
    dtype = getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **source)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=dtype, attn_implementation=arguments.attention, **source
    )
    return model.eval().to(arguments.device), tokenizer


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


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m hf_kvcache eval`, without the word."""
    parser = argparse.ArgumentParser(prog="hf_kvcache eval", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))
