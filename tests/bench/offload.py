"""Decode speed of the tiers: resident rows, host memory fetched or attended where it lies, and files.

Interleaved: one step of each cache in turn, the order turned around every other round; medians, and ratios to the
resident cache. On a machine without a GPU "fetch" copies within host memory, which shows its overhead and nothing else.

    python tests/bench/offload.py
    python tests/bench/offload.py --tokens 512 --steps 4
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from common import TEXTS, forward, load_model, preset, read_prompt, table, track, window_ids, write_json

from hf_kvcache import CPUOffloadedCache, KVCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resident", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--codec", help="a preset; none if not given")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model, getattr(torch, args.dtype))
    ids = window_ids(tokenizer, TEXTS["topics"](), 5_000, args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        disk = dict(disk=folder, host_bytes=0)
        ways: dict[str, dict[str, Any]] = {
            "host, fetch": dict(attend="fetch"),
            "host, compute": dict(attend="compute"),
            "disk, fetch": dict(attend="fetch", **disk),
            "disk, compute": dict(attend="compute", **disk),
        }
        if args.codec is None:
            ways["host, compute, 25% of the pages"] = dict(attend="compute", top_pages=0.25)
        codec = None if args.codec is None else preset(args.codec)
        caches: dict[str, Any] = {"resident": KVCache(model, codec=codec)}
        for name, way in ways.items():
            caches[name] = CPUOffloadedCache(model, resident_length=args.resident, codec=codec, **way)
        logits, _ = read_prompt(model, ids, caches.values())
        token = logits.argmax(-1, keepdim=True)
        times: dict[str, list[float]] = {name: [] for name in caches}
        with torch.no_grad():
            for step in track(range(args.steps + 1), "steps"):
                order = list(caches) if step % 2 else list(reversed(caches))
                for name in order:
                    start = time.perf_counter()
                    forward(model, token, caches[name])
                    times[name].append((time.perf_counter() - start) * 1e3)
        rows = []
        for name, cache in caches.items():
            tiers = cache.nbytes_by_tier()
            middle = statistics.median(times[name][1:])  # the first allocates
            ratio = statistics.median(a / b for a, b in zip(times[name][1:], times["resident"][1:], strict=True))
            size = {f"{tier} MB": round(tiers[tier] / 1e6, 1) for tier in tiers}
            rows.append({"cache": name, "ms per step": middle, "of resident": ratio} | size)
        caches.clear()
    print(f"{label}, {args.dtype}, {args.tokens} tokens, {args.resident} resident, codec {args.codec}")
    print(table(rows))
    write_json(args.json, {"model": label, "tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
