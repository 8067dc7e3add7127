"""Perplexity of a converted model against the original's, on text that the calibration never saw.

    python tests/bench/mla_quality.py [--model NAME] [--rows complex:0.5 transmla:64+128 ...] [--distill]

Calibrated on windows spread over the docstrings of the standard library, measured on the language reference
(`pydoc_data.topics`): windows of 1,024 tokens that start at character 5,000 + 30,000 w. A row names a method (complex,
transmla, freqfold, svd) and a share of the bytes, or sizes rope+rank; `64+full` keeps all but the rotation. Moments are
collected once for each kind of method. With `--distill`, rows of this library's own method are measured once more after
`distill_layers` on windows spread over the same docstrings, with the CPU seconds that took.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from typing import Any

import common
import torch

from hf_kvcache.mla import convert, convert_to_mla, distill_layers

ROWS = [
    "complex:64+full",
    "complex:0.75",
    "complex:0.5",
    "complex:0.31",
    "transmla:64+full",
    "transmla:80+208",
    "transmla:64+128",
    "transmla:40+79",
    "freqfold:64+128",
    "svd:64+128",
]


@torch.no_grad()
def loss_of(model: Any, windows: list[torch.Tensor]) -> float:
    """Mean negative log-likelihood of a token, in nats."""
    total = 0.0
    for ids in windows:
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return total / sum(ids.shape[1] - 1 for ids in windows)


def sizes_of(text: str) -> dict[str, Any]:
    if "+" not in text:
        return {"kv_keep": float(text)}
    rope, rank = text.split("+")
    return {"qk_rope_head_dim": int(rope), "kv_lora_rank": None if rank == "full" else int(rank)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model without it")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--calibration-windows", type=int, default=8)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--distill", action="store_true", help="also after layer-local distillation")
    parser.add_argument("--distill-windows", type=int, default=12, help="one more is held out")
    parser.add_argument("--distill-arguments", default="{}", help="of distill_layers, as JSON")
    parser.add_argument("--json", help="write the result to this file (- for standard output)")
    options = parser.parse_args()
    model, tokenizer, label = common.demo_model.load(options.model)
    text = tokenizer(common.TEXTS["docstrings"](), return_tensors="pt", verbose=False).input_ids[0]
    step = (len(text) - options.tokens) // (options.calibration_windows + 1)
    # One window more, on which sizes are tried.
    starts = range(0, step * (options.calibration_windows + 1), step)
    calibration = [text[start : start + options.tokens][None] for start in starts]
    topics = common.topics_text()
    windows = [common.window_ids(tokenizer, topics, 5000 + 30000 * w, options.tokens) for w in range(options.windows)]
    base = loss_of(model, windows)
    remember_moments()
    rows = []
    for row in common.track(options.rows, "converting"):
        method, sizes = row.split(":")
        start = time.perf_counter()
        converted, report = convert_to_mla(
            copy.deepcopy(model), calibration=calibration, method=method, **sizes_of(sizes)
        )
        seconds = time.perf_counter() - start
        ratio = math.exp(loss_of(converted, windows) - base)
        errors = [layer.error for layer in report.layers]
        rows.append(
            {
                "conversion": row,
                "bytes kept": report.kept,
                "perplexity ratio": ratio,
                "mean error of layers": sum(errors) / len(errors),
                "seconds": seconds,
            }
        )
        print(rows[-1], flush=True)
        if options.distill and method == "complex":
            step = len(text) // (options.distill_windows + 1)
            starts = [step * i + (step - options.tokens) // 2 for i in range(options.distill_windows + 1)]
            spread = [text[start : start + options.tokens][None] for start in starts]
            converted, learned = distill_layers(converted, model, spread, **json.loads(options.distill_arguments))
            errors = [layer.error_after for layer in learned.layers]
            rows.append(
                {
                    "conversion": f"{row} distilled",
                    "bytes kept": report.kept,
                    "perplexity ratio": math.exp(loss_of(converted, windows) - base),
                    "mean error of layers": sum(errors) / len(errors),
                    "seconds": learned.cpu_seconds,
                }
            )
            print(rows[-1], flush=True)
        del converted
    print(f"\n{label}: perplexity {math.exp(base):.3f} on {sum(ids.numel() for ids in windows)} tokens\n")
    print(common.table(rows))
    common.write_json(options.json, {"label": label, "perplexity": math.exp(base), "rows": rows})


def remember_moments() -> None:
    """Conversions of copies of one model have the same moments: collect each kind of them once."""
    found: dict[Any, Any] = {}
    collect = convert._moments

    def remembered(model: Any, hosts: Any, batches: Any, recipe: Any) -> Any:
        key = (recipe.data, recipe.by_attention, tuple(host.name for host in hosts))
        if key not in found:
            found[key] = collect(model, hosts, batches, recipe)
        return found[key]

    convert._moments = remembered


if __name__ == "__main__":
    main()
