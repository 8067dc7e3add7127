"""`hf-kvcache bench`: decode time by context."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.decode import WARM_UP, decode_times
from ..evaluate.plot import require
from ..evaluate.texts import TEXTS, read
from ..pictures import plot_decode_time
from .common import (
    INTERRUPTED,
    Attention,
    Device,
    GgufFile,
    ThreadCount,
    check_caches,
    check_length,
    check_paths,
    load,
    progress,
    say,
    show,
    table_of,
    threads,
    write_json,
)

CACHES = ("kv", "rotated-4", "snapkv:max_capacity_prompt=0.25", "h2o:heavy_ratio=0.125,recent_ratio=0.125")


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id or a folder.", show_default=False)],
    caches: Annotated[
        list[str] | None, typer.Option(metavar="SPEC...", help="Caches to time.", show_default=" ".join(CACHES))
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option(metavar="N...", help="Tokens read before the steps.", show_default="1024 4096")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps that are timed.")] = 20,
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt that are read at once.")] = 2048,
    text: Annotated[
        str, typer.Option(metavar="T", help=f"A file, or a text of Python: {', '.join(TEXTS)}.")
    ] = "topics",
    gguf_file: GgufFile = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the model: bf16, fp16 or fp32.")] = "bf16",
    attention: Attention = "sdpa",
    device: Device = "cpu",
    thread_count: ThreadCount = None,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write every time as JSON; - prints it.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Draw time over context as a PNG.", show_default=False)
    ] = None,
) -> int:
    """Time a decoding step with each cache, by context.

    All caches are interleaved in one run, so that what else the machine does falls on all of them; medians are shown.

    Ctrl-C keeps the contexts that were done.

    \b
    Example:
      hf-kvcache bench MODEL --contexts 1024 4096 8192 --caches kv rotated-4 --threads 1 --plot time.png
    """
    asked, lengths = caches or list(CACHES), sorted(set(contexts or [1024, 4096]))
    check_caches(asked, lengths, "--contexts", default=not caches)
    words = read(text)
    check_paths(json, picture=plot)
    if plot is not None:
        require()
    threads(thread_count)
    loaded, tokenizer = load(model, dtype, attention, device, gguf_file)
    check_length(loaded, max(lengths) + steps + WARM_UP, "--contexts and --steps")
    ids = tokenizer(words[: 12 * max(lengths) + 5000][-12 * max(lengths) :], return_tensors="pt").input_ids
    with progress() as tell:
        result = decode_times(loaded, ids, lengths, asked, steps=steps, chunk=chunk, progress=tell)
    write_json(json, result)
    if plot is not None:
        plot_decode_time(
            ({**row, "tokens": entry["tokens"]} for entry in result["contexts"] for row in entry["rows"]),
            plot,
            f"{Path(result['model']).name}, {result['dtype']}, {result['device']}, {result['threads']} thread(s), "
            f"median of {result['steps']} steps, caches interleaved",
        )
    if str(json) != "-":
        say(f"{result['model']}, {result['dtype']}, {result['threads']} thread(s), median of {steps} steps")
        for entry in result["contexts"]:
            rows = [
                [row["cache"], f"{row['ms']:.2f}", f"{row['times faster']:.2f}", f"{row['bytes']:.3f}"]
                for row in entry["rows"]
            ]
            say()
            show(table_of([f"{entry['tokens']:,} tokens", "ms", "times faster", "bytes"], rows))
        if "interrupted" in result:
            say("interrupted: longer contexts were not measured")
    return INTERRUPTED if "interrupted" in result else 0
