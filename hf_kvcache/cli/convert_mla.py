"""`hf-kvcache convert-mla`: a model converted to latent attention, from a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..evaluate.texts import TEXTS
from ..mla.checkpoint import DTYPES, ROTARY, convert_checkpoint
from .common import check_paths, progress, quiet, say, show, table_of, write_json


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
    check_paths(None if str(json) == "-" else json)
    quiet()
    with progress() as bar:
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
            tell=lambda stage, done, total: bar(done, total, stage),
        )
    write_json(json, found)
    if str(json) != "-":
        _show(found)


def _show(found: dict[str, Any]) -> None:
    head = ["layer", "rank", "rotary key", "bytes a token", "before", "rotary energy", "latent energy", "error"]
    rows = [
        [
            layer["name"],
            str(layer["kv_lora_rank"]),
            str(layer["qk_rope_head_dim"]),
            f"{layer['bytes_after']:,}",
            f"{layer['bytes_before']:,}",
            f"{layer['rotary_energy']:.4f}",
            f"{layer['latent_energy']:.4f}",
            f"{layer['error']:.4f}",
        ]
        for layer in found["conversion"]["layers"]
    ]
    say(f"{found['source']} → {found['out']}")
    show(table_of(head, rows))
    say(f"{found['kept']:.1%} of the cached bytes, {found['seconds']} s")
    ppl = found["perplexity"]
    if ppl is not None:
        say(
            f"perplexity on {ppl['tokens']:,} tokens of {ppl['text']}: {ppl['before']:.3f} before, "
            f"{ppl['after']:.3f} after ({ppl['ratio']:.3f} times)"
        )
    exported = found["exported"]
    if exported is not None:
        say(
            f"DeepseekV3ForCausalLM for {exported['target']}, {exported['dtype']}, {exported['rope']} RoPE, rank "
            f"{exported['kv_lora_rank']}, rotary key {exported['qk_rope_head_dim']}, {exported['nbytes']:,} bytes"
        )
