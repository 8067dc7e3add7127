"""`convert_checkpoint`: a checkpoint in, a converted one out. What `hf-kvcache convert-mla` does, for Python."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..evaluate.texts import read
from ..sizing.units import known_device
from .convert import MLAReport, convert_to_mla
from .distill import distill_layers
from .export import ExportReport, export_deepseek_v3
from .folder import check_room, new_folder, write_tokenizer
from .plan import check_share
from .progress import Tell

ROTARY = {"none": "energy", "hf": "uniform", "vllm": "default"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}
_WINDOW = 1024


def convert_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    kv_keep: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    rotary: str | None = None,
    form: str = "latent",
    text: Sequence[str] = ("docstrings",),
    windows: int = 16,
    held_out: str = "topics",
    held_out_windows: int = 9,
    evaluate: bool = True,
    distill: bool = False,
    export: str = "none",
    dtype: str = "float32",
    out_dtype: str | None = None,
    device: str = "cpu",
    gguf_file: str | None = None,
    overwrite: bool = False,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Load a model, convert it with `convert_to_mla`, measure it, and write it into a folder of its own.

    `out` appears when it is whole, and not before. The report is also in it, as `conversion.json`.

    Args:
        source: a folder (safetensors) or a Hub id; with `gguf_file`, the folder or id that has that file.
        out: the folder to write.
        kv_keep, kv_lora_rank, qk_rope_head_dim, form: as `convert_to_mla` takes them.
        rotary: likewise; if None, what the export needs: "energy" for "none", "uniform" for "hf", "default" for "vllm".
        text: files to calibrate on, or texts that come with Python ("docstrings", "topics").
        windows: how many windows of 1,024 tokens are taken from them, evenly spread.
        held_out, held_out_windows: the text for perplexities, which must be none of `text`, and windows of it.
        evaluate: whether to measure perplexity before and after.
        distill: whether to go on with `distill_layers`, which takes the original's weights a second time in memory.
        export: "none" for the working form, which `AutoModelForCausalLM` reads once hf_kvcache is imported; "hf" or
            "vllm" for `export_deepseek_v3`.
        dtype, out_dtype: to compute with, and to write (the same if None).
        device: where the model runs; "auto" lets accelerate share it out among the devices.
        tell: called with (stage, done, total) as it goes on.

    Returns:
        The report: sizes and errors by layer, perplexities, what was written.

    Raises:
        ValueError, NotImplementedError: wrong arguments, and what `convert_to_mla` and `export_deepseek_v3` refuse.
        OSError: no such model or text, or no room on the disk. Room is looked for before the weights are loaded.
    """
    tell = tell or (lambda stage, done, total: None)
    began = time.perf_counter()
    if export not in ROTARY:
        raise ValueError(f"`export` must be one of {', '.join(ROTARY)}, got {export!r}")
    for name in (dtype, out_dtype):
        if name is not None and name not in DTYPES:
            raise ValueError(f"a dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if windows < 1 or held_out_windows < 1:
        raise ValueError("numbers of windows must be at least 1")
    lossless = form == "pre_rope"
    if lossless and export != "none":
        raise ValueError("the pre-RoPE form has the original's weights: there is nothing to export")
    if lossless and distill:
        raise ValueError("the pre-RoPE form loses nothing: there is nothing to distill")
    if evaluate and held_out in text:
        raise ValueError(f"{held_out!r} is what is calibrated on: name another held-out text, or do not evaluate")
    texts = [] if lossless else [read(name) for name in text]
    asked = read(held_out) if evaluate else ""
    kind = DTYPES[out_dtype or dtype]
    where: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    check_share(kv_keep)
    if device != "auto":
        known_device(device)
    check_room(out, _bytes_of(os.fspath(source), kind, where), overwrite, source)

    tell("loading", 0, 1)
    model, tokenizer = _load(os.fspath(source), DTYPES[dtype], device, where)
    tell("loading", 1, 1)
    limit = min(_WINDOW, getattr(model.config, "max_position_embeddings", None) or _WINDOW)
    calibration = _spread(tokenizer, "\n\n".join(texts), windows, limit, ", ".join(text)) if texts else []
    held = _spread(tokenizer, asked, held_out_windows, limit, held_out) if evaluate else []
    before = _loss(model, held, tell, "perplexity before") if held else None
    teacher = copy.deepcopy(model) if distill else None

    arguments: dict[str, Any] = {"form": form}
    if not lossless:
        arguments |= {"kv_keep": kv_keep, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
        arguments |= {"rotary": rotary or ROTARY[export], "calibration": calibration}
    elif any(x is not None for x in (kv_keep, kv_lora_rank, qk_rope_head_dim, rotary)):
        raise ValueError("the pre-RoPE form takes no sizes: it keeps the hidden size")
    model, report = convert_to_mla(model, **arguments, progress=tell)
    distilled = None
    if teacher is not None:
        distilled = distill_layers(model, teacher, calibration, progress=tell)[1].to_dict()
    after = _loss(model, held, tell, "perplexity after") if held else None

    found: dict[str, Any] = {
        "source": os.fspath(source),
        "out": os.fspath(out),
        "form": form,
        "export": export,
        "dtype": str(kind).removeprefix("torch."),
        "kept": report.kept,
        "calibration": {"text": [] if lossless else list(text), "windows": len(calibration), "tokens": limit},
        "distilled": distilled,
        "perplexity": None,
        "conversion": report.to_dict(),
    }
    if before is not None and after is not None:
        found["perplexity"] = {
            "text": held_out,
            "tokens": sum(ids.numel() for ids in held),
            "before": math.exp(before),
            "after": math.exp(after),
            "ratio": math.exp(after - before),
        }
    tell("writing", 0, 1)
    found["exported"] = _write(model, tokenizer, out, export, kind, overwrite, found, began)
    tell("writing", 1, 1)
    return found


def _write(
    model: Any,
    tokenizer: Any,
    out: str | os.PathLike[str],
    export: str,
    dtype: torch.dtype,
    overwrite: bool,
    found: dict[str, Any],
    began: float,
) -> dict[str, Any] | None:
    """Everything into one new folder; what the export says of it."""
    nbytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    with new_folder(out, nbytes, overwrite, found["source"]) as folder:
        exported: ExportReport | None = None
        if export == "none":
            (model if model.dtype == dtype else model.to(dtype)).save_pretrained(folder)
            write_tokenizer(folder, tokenizer, None)
        else:
            exported = export_deepseek_v3(model, folder / "export", export, tokenizer=tokenizer, dtype=dtype)
            exported.path = os.fspath(out)
            for file in sorted((folder / "export").iterdir()):
                file.rename(folder / file.name)
            (folder / "export").rmdir()
        found["seconds"] = round(time.perf_counter() - began, 1)
        said = found | {"exported": None if exported is None else exported.to_dict()}
        (folder / "conversion.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return None if exported is None else exported.to_dict()


def _bytes_of(source: str, dtype: torch.dtype, where: dict[str, Any]) -> int:
    """About what the converted model takes on the disk: the original's, its head written out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source, **where)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in made.parameters()) * dtype.itemsize


def _load(source: str, dtype: torch.dtype, device: str, where: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    kwargs = {"device_map": "auto"} if device == "auto" else {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **where, **kwargs)
    if where:
        # A model loaded from GGUF takes itself for a quantized one, which cannot be saved.
        config = copy.deepcopy(model.config)
        del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        model = plain
    if device != "auto":
        model.to(device)
    return model.eval(), tokenizer


def _spread(tokenizer: Any, text: str, count: int, tokens: int, name: str) -> list[torch.Tensor]:
    """`count` windows of `[1, tokens]` ids, evenly spread over the text and not overlapping."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(ids) < count * tokens:
        raise ValueError(
            f"{name} has {len(ids):,} tokens, and {count} windows of {tokens:,} take {count * tokens:,}: give more "
            "text, or ask for fewer windows"
        )
    step = (len(ids) - tokens) // max(1, count - 1) if count > 1 else 0
    return [ids[start : start + tokens][None] for start in (i * step for i in range(count))]


@torch.no_grad()
def _loss(model: Any, windows: list[torch.Tensor], tell: Tell, stage: str) -> float:
    """Mean negative log-likelihood of a token, in nats."""
    total, tokens = 0.0, 0
    for done, ids in enumerate(windows):
        tell(stage, done, len(windows))
        ids = ids.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    tell(stage, len(windows), len(windows))
    return total / tokens


__all__ = ["MLAReport", "convert_checkpoint"]
