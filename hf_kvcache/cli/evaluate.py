"""`hf-kvcache eval`: how faithful caches are on a model of yours, and how small."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..evaluate import TEXTS, plot
from ..evaluate import evaluate as measure
from ..evaluate.needles import ANSWER_TOKENS
from ..evaluate.report import headline, markdown, plain, rows
from ..evaluate.run import CACHES, show_progress
from ..evaluate.texts import read
from ..specs import codecs, policies
from .common import (
    INTERRUPTED,
    Attention,
    Device,
    GgufFile,
    ThreadCount,
    Wrong,
    check_caches,
    check_length,
    check_paths,
    load,
    say,
    threads,
    write_json,
)

_KNOWN = f"policies {', '.join(policies())} and codecs {', '.join(codecs())}, joined with +, arguments after a colon"


def evaluate(
    model: Annotated[str, typer.Option(metavar="NAME", help="A Hub id or a folder.", show_default=False)],
    gguf_file: GgufFile = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="T...", help=f"Files, or texts of Python: {', '.join(TEXTS)}.", show_default="topics"),
    ] = None,
    caches: Annotated[
        list[str] | None, typer.Option(metavar="SPEC...", help=f"Caches: {_KNOWN}.", show_default="some of each")
    ] = None,
    prompt: Annotated[int, typer.Option(metavar="N", help="Tokens read in one call.")] = 1024,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens fed one at a time.")] = 64,
    windows: Annotated[int, typer.Option(metavar="N", help="Windows of each text.")] = 4,
    needles: Annotated[int, typer.Option(metavar="N", help="Prompts with a planted code.")] = 0,
    shared_prompt: Annotated[
        bool, typer.Option("--shared-prompt", help="Caches that keep every token share one prompt pass.")
    ] = False,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the model: float32, bfloat16, float16.")] = "float32",
    attention: Attention = "sdpa",
    device: Device = "cpu",
    thread_count: ThreadCount = None,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all figures as JSON; - prints them.", show_default=False)
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Draw KL over size as a PNG.", show_default=False)
    ] = None,
    plot_x: Annotated[str, typer.Option(metavar="NAME", help="Size in the plot: bits or bytes.")] = "bits",
    markdown_: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> int:
    """Measure how faithful caches are, and how small.

    Predictions with each cache are compared with the full cache's, token by token.

    Ctrl-C keeps the windows that were done (of the first one, the caches that were).

    \b
    Example:
      hf-kvcache eval --model MODEL --caches kv kivi-4 snapkv:max_capacity_prompt=0.25 --json out.json
    """
    names, specs = text or ["topics"], caches or list(CACHES)
    check_caches(specs, [prompt], "--prompt", default=not caches)
    texts = {name: read(name) for name in names}
    if plot_path is not None:
        plot.require()
    if plot_x not in plot.X_AXES:
        raise Wrong(f"--plot-x must be {' or '.join(plot.X_AXES)}, got {plot_x!r}")
    check_paths(json, picture=plot_path)
    threads(thread_count)
    loaded, tokenizer = load(model, dtype, attention, device, gguf_file)
    # A planted code takes as many tokens of answer, in place of those that are fed.
    fed = max(tokens, ANSWER_TOKENS) if needles else tokens
    check_length(loaded, prompt + fed, "--prompt and --tokens")
    with show_progress() as tell:
        result = measure(
            loaded,
            tokenizer,
            texts,
            specs,
            prompt=prompt,
            tokens=tokens,
            windows=windows,
            needles=needles,
            shared_prompt=shared_prompt,
            progress=tell,
            keep_partial=True,
        )
    write_json(json, result)
    if plot_path is not None:
        plot.pareto(result, plot_path, plot_x)
    if str(json) != "-":
        say(headline(result))
        say()
        say((markdown if markdown_ else plain)(rows(result)))
    return INTERRUPTED if "interrupted" in result else 0
