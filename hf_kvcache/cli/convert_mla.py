"""`hf-kvcache convert-mla`: a model converted to latent attention, from a shell."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer

from ..evaluate.texts import TEXTS
from ..mla.checkpoint import DTYPES, ROTARY, convert_checkpoint

_EVERY = 0.1  # seconds between two changes of the bar


def convert_mla(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A folder (safetensors) or a Hub id.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    kv_keep: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the cached bytes to keep.", show_default="0.5")
    ] = None,
    kv_lora_rank: Annotated[
        int | None, typer.Option(metavar="N", help="Numbers of a token's latent, instead.", show_default=False)
    ] = None,
    qk_rope_head_dim: Annotated[
        int | None, typer.Option(metavar="N", help="Numbers of its rotary key.", show_default=False)
    ] = None,
    pre_rope: Annotated[
        bool, typer.Option("--pre-rope", help="The lossless form for multi-head attention; takes no sizes.")
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="T...", help=f"Files to calibrate on, or {', '.join(TEXTS)}.", show_default="docstrings"),
    ] = None,
    windows: Annotated[int, typer.Option(metavar="N", help="Windows of 1,024 tokens to calibrate on.")] = 16,
    held_out: Annotated[str, typer.Option(metavar="T", help="The text for perplexities.")] = "topics",
    held_out_windows: Annotated[int, typer.Option(metavar="N", help="Windows of it.")] = 9,
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Measure perplexity before and after.")
    ] = True,
    distill: Annotated[
        bool, typer.Option("--distill/--no-distill", help="Train each layer on the original's outputs.")
    ] = False,
    export: Annotated[
        str, typer.Option(metavar="|".join(ROTARY), help="Write a standard DeepSeek-V3 checkpoint.")
    ] = "none",
    dtype: Annotated[str, typer.Option(metavar="NAME", help=f"To compute with: {', '.join(DTYPES)}.")] = "float32",
    out_dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of what is written.", show_default="as --dtype")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where the model runs, or 'auto'.")] = "cpu",
    gguf_file: Annotated[
        str | None, typer.Option(metavar="F", help="The GGUF file of IN to load.", show_default=False)
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the report as JSON; - prints it.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.")] = False,
) -> None:
    """Convert a model to multi-head latent attention.

    OUT appears when it is whole: a run that fails or is killed leaves nothing under that name.

    \b
    Examples:
      hf-kvcache convert-mla MODEL OUT --kv-keep 0.75 --json report.json
      hf-kvcache convert-mla MODEL OUT --kv-keep 0.5 --export vllm --out-dtype bfloat16
    """
    if json is not None and str(json) != "-" and not json.absolute().parent.is_dir():
        raise _failed(ValueError(f"--json: {json.absolute().parent} is no folder"))
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    with _Bar() as bar:
        try:
            found = convert_checkpoint(
                source,
                out,
                kv_keep=kv_keep,
                kv_lora_rank=kv_lora_rank,
                qk_rope_head_dim=qk_rope_head_dim,
                form="pre_rope" if pre_rope else "latent",
                text=text or ["docstrings"],
                windows=windows,
                held_out=held_out,
                held_out_windows=held_out_windows,
                evaluate=evaluate,
                distill=distill,
                export=export,
                dtype=dtype,
                out_dtype=out_dtype,
                device=device,
                gguf_file=gguf_file,
                overwrite=overwrite,
                tell=bar.tell,
            )
        except (ValueError, NotImplementedError, ImportError, OSError) as error:
            raise _failed(error) from error
    if str(json) == "-":
        print(json_module.dumps(found, indent=1))
        return
    if json is not None:
        part = json.with_name(f".{json.name}.{os.getpid()}")
        part.write_text(json_module.dumps(found, indent=1) + "\n", encoding="utf-8")
        part.replace(json)
    _show(found)


def _failed(error: Exception) -> typer.Exit:
    """One line on stderr, and exit code 2."""
    words = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {words if len(words) <= 600 else words[:597] + '...'}", file=sys.stderr)
    return typer.Exit(2)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found['source']} → {found['out']}")
    for column in ("layer", "rank", "rotary key", "bytes a token", "before", "rotary energy", "latent energy", "error"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for layer in found["conversion"]["layers"]:
        table.add_row(
            layer["name"],
            str(layer["kv_lora_rank"]),
            str(layer["qk_rope_head_dim"]),
            f"{layer['bytes_after']:,}",
            f"{layer['bytes_before']:,}",
            f"{layer['rotary_energy']:.4f}",
            f"{layer['latent_energy']:.4f}",
            f"{layer['error']:.4f}",
        )
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    print(f"{found['kept']:.1%} of the cached bytes, {found['seconds']} s")
    ppl = found["perplexity"]
    if ppl is not None:
        print(
            f"perplexity on {ppl['tokens']:,} tokens of {ppl['text']}: {ppl['before']:.3f} before, "
            f"{ppl['after']:.3f} after ({ppl['ratio']:.3f} times)"
        )
    exported = found["exported"]
    if exported is not None:
        print(
            f"DeepseekV3ForCausalLM for {exported['target']}, {exported['dtype']}, {exported['rope']} RoPE, rank "
            f"{exported['kv_lora_rank']}, rotary key {exported['qk_rope_head_dim']}, {exported['nbytes']:,} bytes"
        )


class _Bar:
    """A bar for each stage, on stderr and on a terminal only."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.tasks: dict[str, Any] = {}
        self.last = 0.0

    def __enter__(self) -> _Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def tell(self, stage: str, done: int, total: int) -> None:
        if self.bar is None:
            return
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        if done in (0, total) or time.monotonic() - self.last > _EVERY:
            self.last = time.monotonic()
            self.bar.update(self.tasks[stage], completed=done, total=total)
