"""`hf-kvcache recommend`: the line of Python for a model, a memory and a context."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from ..evaluate import TEXTS
from ..evaluate import evaluate as measure
from ..evaluate.report import windows_of
from ..evaluate.run import show_progress
from ..evaluate.texts import read
from ..sizing import load_config, measure_sizes, read_bytes, read_dtype, show_bytes
from ..sizing.recommend import (
    CANDIDATES,
    Candidate,
    add_measurements,
    candidates,
    check_model,
    choose,
    fixed_sizes,
    measured_as,
    read_measurements,
)
from ..specs import parse_spec
from .common import (
    INTERRUPTED,
    GgufFile,
    ThreadCount,
    Wrong,
    check_caches,
    check_length,
    check_paths,
    load,
    note,
    say,
    show,
    table_of,
    threads,
    write_json,
)


def recommend(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id or a folder.", show_default=False)],
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="As 24GB or 24GiB.", show_default=False)],
    context: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a sequence, prompt and answer.", show_default=False)
    ],
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences.")] = 1,
    lossless: Annotated[bool, typer.Option("--lossless", help="Only caches that lose nothing; no measuring.")] = False,
    max_kl: Annotated[
        float | None,
        typer.Option(metavar="X", help="Largest KL from the full cache, nats a token.", show_default="0.02"),
    ] = None,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="Of the good ones the smallest, not the most faithful.")
    ] = False,
    caches: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC...", help="Candidates; sizes as shares of the prompt.", show_default="a few of each"
        ),
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Take fidelity from what `eval --json` wrote.", show_default=False),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="T...", help=f"Files, or texts of Python: {', '.join(TEXTS)}.", show_default="topics"),
    ] = None,
    prompt: Annotated[int, typer.Option(metavar="N", help="Tokens of the prompts that are measured on.")] = 1024,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens fed after each.")] = 32,
    windows: Annotated[int, typer.Option(metavar="N", help="Windows of each text.")] = 2,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of weights and cache: bf16, fp16, fp32.", show_default="config's"),
    ] = None,
    weight_bits: Annotated[
        float | None, typer.Option(metavar="N", help="Bits of a weight, for quantized checkpoints.", show_default=False)
    ] = None,
    measure_dtype: Annotated[str, typer.Option(metavar="NAME", help="In which fidelity is measured.")] = "float32",
    attention: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Attention implementation.", show_default="sdpa, or eager without it"),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where it is measured.")] = "cpu",
    gguf_file: GgufFile = None,
    thread_count: ThreadCount = None,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write candidates and measurements.", show_default=False)
    ] = None,
) -> int:
    """Find a cache that fits, and print its Python.

    Bytes are counted from the config at the context asked for. Of what fits, a few candidates are measured against the
    full cache, on prompts shorter than that (--prompt), unless the full cache fits or --measurements has the figures.

    \b
    Example:
      hf-kvcache recommend MODEL --gpu-memory 24GB --context 65536 --max-kl 0.02
    """
    if lossless and max_kl is not None:
        raise Wrong("--lossless and --max-kl exclude each other: give one")
    if max_kl is not None and not max_kl > 0:  # so that it catches nan too
        raise Wrong(f"--max-kl must be above 0, got {max_kl:g}; --lossless is for none at all")
    for name, value in (("--context", context), ("--batch", batch)):
        if value < 1:
            raise Wrong(f"{name} must be at least 1, got {value}")
    if weight_bits is not None and not 0 < weight_bits < inf:
        raise Wrong(f"--weight-bits must be a number above 0, got {weight_bits:g}")
    limit = None if lossless else 0.02 if max_kl is None else max_kl
    memory = read_bytes(gpu_memory)
    check_paths(json)
    stored = None if measurements is None else read_measurements(measurements)
    texts = {name: read(name) for name in text or ["topics"]}
    asked = caches or (list(CANDIDATES) if stored is None else _specs_of(stored))
    for spec in caches or []:
        parse_spec(spec).check(context)
    sizes = measure_sizes(load_config(model), None if dtype is None else read_dtype(dtype), model)
    if stored is not None and measurements is not None:
        other = check_model(stored, measurements, sizes)
        if other is not None:
            note(f"{measurements} was measured on {other}, which has the same config as {model}")
    found = candidates(sizes, asked, context, batch, memory, weight_bits)
    result: dict[str, Any] | None = stored
    wanted = _to_measure(found, limit, smallest)
    if stored is not None:
        add_measurements(found, stored)
    elif wanted:
        fixed = sorted({name for spec in wanted for name in fixed_sizes(spec)})
        if fixed:
            raise Wrong(
                f"{', '.join(fixed)} of a candidate counts tokens, so a prompt of {prompt:,} says nothing about "
                f"{context:,}: give a share of the prompt, as {fixed[0]}=0.25"
            )
        check_caches(wanted, [prompt], "--prompt", default=caches is None)
        check_length(sizes.model, prompt + tokens, "--prompt and --tokens")
        threads(thread_count)
        if attention is None:
            attention = "sdpa" if getattr(sizes.model, "_supports_sdpa", True) else "eager"
            if attention == "eager":
                note(f"{type(sizes.model).__name__} has no sdpa attention, so it is measured with --attention eager")
        loaded, tokenizer = load(model, measure_dtype, attention, device, gguf_file)
        with show_progress() as tell:
            result = measure(
                loaded,
                tokenizer,
                texts,
                wanted,
                prompt=prompt,
                tokens=tokens,
                windows=windows,
                shared_prompt=True,
                progress=tell,
                keep_partial=True,
            )
        add_measurements(found, result)
    content: dict[str, Any] = {"model": model, "context": context, "batch": batch, "memory": memory, "max_kl": limit}
    content |= {"candidates": [c.as_dict() for c in found], "chosen": None, "measurements": result}
    write_json(json, content)  # before the choice, which may be that there is none
    chosen = choose(found, limit, smallest)
    write_json(json, content | {"chosen": chosen.as_dict()})
    _print(found, chosen, memory, result, f"{batch} x {context:,} tokens")
    return INTERRUPTED if result is not None and "interrupted" in result else 0


def _specs_of(stored: dict[str, Any]) -> list[str]:
    found = [str(parse_spec(entry["spec"])) for entry in stored["caches"]]
    return list(dict.fromkeys(["kv", *found, "offload:resident_length=1024"]))


def _to_measure(found: list[Candidate], limit: float | None, smallest: bool) -> list[str]:
    """Specs to measure: what fits and may be chosen. Nothing, where a lossless cache wins anyway."""
    if limit is None:
        return []
    if not smallest and any(c.fits and c.lossless and not c.offloaded for c in found):
        return []
    return list(dict.fromkeys(measured_as(c.cache) for c in found if c.fits and not c.lossless))


def _print(found: list[Candidate], chosen: Candidate, memory: int, result: dict[str, Any] | None, where: str) -> None:
    rows = []
    for c in found:
        if c.refused is not None:
            rows.append([c.cache, "", "", "refused", "", ""])
            continue
        kl = "0 (lossless)" if c.lossless else "not measured" if c.kl is None else f"{c.kl:.2g}"
        top = "" if c.top1 is None else f"{c.top1:.3f}"
        mark = "<- take this" if c is chosen else ""
        bytes_ = [show_bytes(c.total_bytes), show_bytes(c.with_weights)]
        rows.append([c.cache, *bytes_, "yes" if c.fits else "no", kl, top, mark])
    head = ["cache", "bytes", "device + weights", f"fits {show_bytes(memory)}", "KL", "top-1", ""]
    say(where)
    show(table_of(head, [row + [""] * (len(head) - len(row)) for row in rows], left=(0, 6)))
    say()
    say(chosen.python)
    say()
    fidelity = "nothing is lost"
    if not chosen.lossless and result is not None:
        asked = result["arguments"]
        fidelity = (
            f"KL {chosen.kl:.2g} nats a token, the same top token {chosen.top1:.1%} of the time (prompts of "
            f"{asked['prompt']:,} tokens, {windows_of(result)})"
        )
    say(f"# {show_bytes(chosen.total_bytes)}, {show_bytes(chosen.with_weights)} with the weights; {fidelity}")
    if result is not None and "interrupted" in result:
        say("# interrupted: not every candidate or window was measured")
