"""Perplexity of models with fewer KV heads against the original's, before and after healing.

    python tests/bench/gqa_quality.py [--heads 1] [--methods mean aligned fit] [--minutes 3]

Calibrated and healed on the docstrings of the standard library, measured on the language reference
(`pydoc_data.topics`), windows of 1,024 tokens that start at character 5,000 + 30,000 w. Healing is LoRA towards the
original's predictions, the same for every method: so many minutes of process CPU time (0: none), with a learning rate
that rises and falls over them.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from typing import Any

import common
import torch
from mla_quality import loss_of
from torch import nn

from hf_kvcache.gqa import convert, convert_to_gqa


def heal(model: Any, teacher: Any, windows: list[torch.Tensor], minutes: float, rate: float, rank: int) -> Any:
    """The model with adapters trained and merged, how many steps that were, and the loss of the last tenth (nats)."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    student = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)).train()
    weights = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    start, losses = time.process_time(), []
    while (done := (time.process_time() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 10 * done + 0.02, 1.1 * (1 - done) + 0.02)
        ids = windows[len(losses) % len(windows)]
        with torch.no_grad():
            wanted = teacher(ids, use_cache=False).logits[0].log_softmax(-1)
        got = student(ids, use_cache=False).logits[0].log_softmax(-1)
        loss = nn.functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    last = losses[-max(1, len(losses) // 10) :]
    return student.merge_and_unload().eval(), len(losses), sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model without it")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=["mean", "aligned", "fit"])
    parser.add_argument("--minutes", type=float, default=3.0, help="of CPU time of this process, for each healing")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--calibration-windows", type=int, default=8)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heal-tokens", type=int, default=256, help="of a training window, one a step")
    parser.add_argument("--json", help="write the result to this file (- for standard output)")
    options = parser.parse_args()
    model, tokenizer, label = common.demo_model.load(options.model)
    text = tokenizer(common.TEXTS["docstrings"](), return_tensors="pt", verbose=False).input_ids[0]
    step = (len(text) - options.tokens) // (options.calibration_windows + 1)
    # One window more, which errors are measured on.
    starts = range(0, step * (options.calibration_windows + 1), step)
    calibration = [text[start : start + options.tokens][None] for start in starts]
    pieces = list(text[: len(text) // options.heal_tokens * options.heal_tokens].view(-1, 1, options.heal_tokens))
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    training = [pieces[i] for i in order]
    topics = common.topics_text()
    windows = [common.window_ids(tokenizer, topics, 5000 + 30000 * w, options.tokens) for w in range(options.windows)]
    base = loss_of(model, windows)
    print(f"{label}: perplexity {math.exp(base):.3f} on {sum(ids.numel() for ids in windows)} tokens", flush=True)
    remember_moments()
    rows = []
    for method in common.track(options.methods, "converting"):
        start = time.process_time()
        converted, report = convert_to_gqa(copy.deepcopy(model), options.heads, calibration=calibration, method=method)
        row: dict[str, Any] = {
            "method": method,
            "bytes kept": report.kept,
            "mean error of layers": sum(layer.error for layer in report.layers) / len(report.layers),
            "CPU seconds": time.process_time() - start,
            "perplexity ratio": math.exp(loss_of(converted, windows) - base),
        }
        if options.minutes:
            healed, steps, loss = heal(converted, model, training, options.minutes, options.rate, options.rank)
            row |= {
                "healed": math.exp(loss_of(healed, windows) - base),
                "steps": steps,
                "KL of the last steps": loss,
            }
        rows.append(row)
        print(row, flush=True)
    print(f"\n{common.table(rows)}")
    common.write_json(options.json, {"label": label, "perplexity": math.exp(base), "rows": rows})


def remember_moments() -> None:
    """Conversions of copies of one model have the same moments: collect them once."""
    found: dict[Any, Any] = {}
    collect = convert.collect

    def remembered(model: Any, hosts: Any, batches: Any) -> Any:
        key = tuple(host.name for host in hosts)
        if key not in found:
            found[key] = collect(model, hosts, batches)
        return dict(found[key])

    convert.collect = remembered


if __name__ == "__main__":
    main()
