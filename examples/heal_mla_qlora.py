"""Convert a model to latent attention and heal it: 4-bit weights, LoRA, perplexity against a control, merge, export.

    python examples/heal_mla_qlora.py --keep 0.5 --steps 200 --out healed/
    python examples/heal_mla_qlora.py --converted half/ --checkpoints run/ --out healed/ --export hf
    accelerate launch --num_processes 2 examples/heal_mla_qlora.py --converted half/ --out healed/

The control is the original with the same adapters, text and steps, so what the text alone improves does not count as
healed. Perplexity is that of `pydoc`'s topics, which neither calibration nor training sees. Run again with the same
`--checkpoints` to go on where a run was stopped. See `docs/healing.md`.

Needs peft, bitsandbytes and accelerate: `pip install "hf-kvcache[train]"`.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import healing
from demo_model import load
from hf_kvcache import convert_to_mla, export_deepseek_v3, merge_healed
from hf_kvcache.evaluate.texts import docstrings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def convert(model: Any, tokenizer: Any, keep: float, tokens: int = 1024, count: int = 9) -> Any:
    """A converted copy, calibrated on windows spread over docstrings (the last one chooses sizes)."""
    ids = tokenizer(docstrings(), return_tensors="pt", verbose=False).input_ids[0]
    stride = (len(ids) - tokens) // count
    calibration = [ids[stride * n :][:tokens][None] for n in range(count)]
    converted, report = convert_to_mla(copy.deepcopy(model), kv_keep=keep, calibration=calibration)
    print(f"converted to {report.kept:.0%} of the bytes")
    return converted


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the original: a Hub id or folder; the demo model if not given")
    parser.add_argument("--converted", help="its converted checkpoint; converted here if not given")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the bytes to keep when converting here")
    parser.add_argument("--calibration-tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="to train in; float32 is converted")
    parser.add_argument("--out", help="a folder for the merged model, in full precision")
    parser.add_argument("--merge-into", choices=("decoded", "original"), default="decoded", help="4-bit weights or not")
    parser.add_argument("--export", choices=("hf", "vllm"), help="also write a DeepSeek-V3 checkpoint to OUT-export")
    parser.add_argument("--json", help="a file for the figures")
    healing.add_arguments(parser)
    args = parser.parse_args(arguments)
    if args.export:
        if not args.out:
            parser.error("--export needs --out")
    from accelerate import Accelerator

    accelerator = Accelerator()
    original, tokenizer, label = load(args.model, torch.float32)
    original.to(accelerator.device)
    if args.converted:
        model = AutoModelForCausalLM.from_pretrained(args.converted, dtype=torch.float32).to(accelerator.device)
    else:
        model = convert(original, tokenizer, args.keep, args.calibration_tokens)
    base = copy.deepcopy(model) if args.merge_into == "original" else None  # in float32
    model, original = model.to(DTYPES[args.dtype]), original.to(DTYPES[args.dtype])
    accelerator.print(label)
    healed, result = healing.compare(model, original, tokenizer, args, accelerator, args.targets)
    if accelerator.is_main_process:
        merged = merge_healed(healed, base)
        evaluation = healing.held_out(tokenizer, args.windows, args.window_tokens)
        result["merged"] = healing.perplexity(merged, evaluation)
        print(f"perplexity {result['merged']:.3f} merged into {args.merge_into} weights")
        if args.out:
            merged.save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
            print(f"merged model in {args.out}")
        if args.export:
            export_deepseek_v3(merged, f"{args.out}-export", target=args.export)
            print(f"DeepSeek-V3 checkpoint in {args.out}-export")
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1))
    accelerator.wait_for_everyone()
    return result


if __name__ == "__main__":
    main()
