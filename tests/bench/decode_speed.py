"""CPU decode speed at a long context, all caches interleaved in one run.

A prompt goes through each cache in pieces of 2,048 tokens; then one token after the other is fed to every cache in
turn, so that whatever else the machine does falls on all of them alike. Medians of the steps, and ratios to the
`DynamicCache`. `--profile` adds where the time of a step goes, by operation and by file.
`hf-kvcache bench` times the same for any model, by context.

    python tests/bench/decode_speed.py --threads 1
    python tests/bench/decode_speed.py --tokens 2048 --dtype float32
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from typing import Any

import torch
from common import attach, full_nbytes, load_model, make_cache, table, topics_text, track, write_json
from transformers import DynamicCache

from hf_kvcache.bench import WARM_UP, prefill, step, summary

CACHES = ["identity", "snapkv", "h2o", "window"]


def profile(model: Any, cache: Any, token: torch.Tensor, steps: int, name: str) -> None:
    """Print the operations (torch.profiler) and the functions (cProfile) that a step spends its time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step(model, cache, token)
    print(f"\n{name}: operations over {steps} steps")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=40))
    python = cProfile.Profile()
    python.enable()
    for _ in range(steps):
        step(model, cache, token)
    python.disable()
    print(f"{name}: functions over {steps} steps, by own time")
    pstats.Stats(python).strip_dirs().sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--tokens", type=int, default=8192 - 256, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--caches", nargs="+", default=CACHES)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model, getattr(torch, args.dtype))
    ids = tokenizer(topics_text()[5000 : 5000 + 12 * args.tokens], return_tensors="pt").input_ids[:, : args.tokens]
    attach(model)
    caches: dict[str, Any] = {"DynamicCache": DynamicCache(config=model.config)}
    caches |= {spec: make_cache(model, spec, int(args.tokens * args.budget)) for spec in args.caches}
    for cache in track(list(caches.values()), "prompts"):
        prefill(model, cache, ids, args.chunk)
    token = ids[:, :1]
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in track(range(args.steps + WARM_UP), "steps"):
        for name, cache in caches.items():
            times[name].append(step(model, cache, token))
    rows = summary(times, {name: full_nbytes(cache) for name, cache in caches.items()})
    print(f"{label}, {args.dtype}, {args.tokens} tokens, {torch.get_num_threads()} thread(s), median of {args.steps}")
    print(table(rows))
    if args.profile:
        for name, cache in caches.items():
            profile(model, cache, token, 10, name)
    write_json(args.json, {"model": label, "tokens": args.tokens, "dtype": args.dtype, "rows": rows, "times": times})


if __name__ == "__main__":
    main()
