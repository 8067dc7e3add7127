"""`hf-kvcache estimate`: bytes of every technique, from a config alone."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from ..sizing import estimate as count
from ..sizing import load_config, measure_sizes, read_bytes, read_dtype, show_bytes, show_count
from ..sizing.plot import bars, require
from ..sizing.survey import SurveyRow, survey
from ..sizing.table import Estimate
from .common import Wrong, check_paths, progress, say, show, table_of, write_json


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hub id, a folder, a config.json, or one of llama-2-7b, llama-2-70b, llama-3-8b. Only the config is "
            "read; no weights are downloaded.",
            show_default=False,
        ),
    ],
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence, prompt and answer.")] = 8192,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences.")] = 1,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="As 80GB (10^9 bytes) or 80GiB (2^30): adds what fits.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="bf16, fp16 or fp32 (default: the config's).", show_default=False)
    ] = None,
    weight_bits: Annotated[
        float | None, typer.Option(metavar="N", help="Bits of a weight, for quantized checkpoints.", show_default=False)
    ] = None,
    caches: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC...", help="Caches to count, as kivi-4 (default: all of use).", show_default=False),
    ] = None,
    survey_: Annotated[
        bool, typer.Option("--survey", help="Add the arithmetic of papers beside what is really held.")
    ] = False,
    gib: Annotated[bool, typer.Option("--gib", help="Show GiB (2^30) instead of GB (10^9).")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write JSON; - prints it.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Draw the bars as a PNG.", show_default=False)
    ] = None,
) -> int:
    """Count the bytes of every cache, from a config alone.

    Each figure is the formula of the cache itself, everything included: scales, positions, exact windows, room to grow.
    Weights are counted from the model's shapes. Activations are not counted: leave a tenth of the memory for them.

    \b
    Example:
      hf-kvcache estimate llama-3-8b --context 131072 --batch 8 --gpu-memory 80GB
    """
    check_paths(json, picture=plot)
    if weight_bits is not None and not 0 < weight_bits < inf:
        raise Wrong(f"--weight-bits must be a number above 0, got {weight_bits:g}")
    if plot is not None:
        require()
    memory = None if gpu_memory is None else read_bytes(gpu_memory)
    chosen = None if dtype is None else read_dtype(dtype)
    with progress() as tell:
        sizes = measure_sizes(load_config(model), chosen, model)
        found = count(sizes, context, batch, memory, caches or None, weight_bits, tell)
        lines = survey(sizes, context, batch) if survey_ else []
    content: dict[str, Any] = found.as_dict()
    if lines:
        content["survey"] = [line.as_dict() for line in lines]
    write_json(json, content)
    if plot is not None:
        bars(found, plot)
    if str(json) != "-":
        _print(found, lines, gib)
    return 0


def _print(found: Estimate, lines: list[SurveyRow], gib: bool) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.layers.items())
    say(
        f"{found.model} ({found.model_type}), {found.dtype}: {found.parameters:,} weights, "
        f"{show_bytes(found.weights_bytes, gib)}; layers: {kinds}"
    )
    trained = "" if found.trained_length is None else f"; the model was made for {found.trained_length:,}"
    say(f"{found.batch} x {found.context:,} tokens{trained}")
    head = ["cache", "lossless", "a sequence", "total", "of full", "device + weights"]
    if found.memory is not None:
        head += [f"fits {show_bytes(found.memory, gib)}", "longest context", "largest batch"]
    rows = []
    for row in found.rows:
        cells = [row.cache, "yes" if row.lossless else "", show_bytes(row.bytes_per_sequence, gib)]
        cells += [show_bytes(row.bytes_total, gib), f"{row.ratio:.3f}", show_bytes(row.with_weights, gib)]
        if found.memory is not None:
            cells += ["yes" if row.fits else "no", show_count(row.longest_context), show_count(row.largest_batch)]
        rows.append([*cells, row.note])
    say()
    show(table_of([*head, "note"], rows, left=(0, len(head))))
    if found.refused:
        say()
        say("not for this model:")
        for spec, reason in found.refused.items():
            say(f"  {spec}: {' '.join(reason.split())}")
    if found.memory is not None and not any(row.fits for row in found.rows):
        say()
        short = show_bytes(found.weights_bytes, gib)
        say(f"Nothing fits: the weights alone take {short}. Try --weight-bits 4, a smaller --context or --batch.")
    if lines:
        say()
        _print_survey(lines)


def _print_survey(lines: list[SurveyRow]) -> None:
    words = {None: "has none", True: "yes", False: "no"}
    rows = [
        [
            line.name,
            show_bytes(line.counted, True),
            show_bytes(line.counted),
            words[line.scales],
            show_bytes(line.held, True),
            line.cache,
            line.left_out,
        ]
        for line in lines
    ]
    head = ["as papers count", "GiB", "GB", "scales counted", "really held", "by", "which the first leaves out"]
    show(table_of(head, rows, left=(0, 5, 6)))
