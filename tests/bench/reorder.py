"""How long beams take to be reordered over prefixes of different lengths: shared rows stay where they are.

One cache for each length, `--beams` beams over it and a few private tokens; then all of them are reordered in turn.

    python tests/bench/reorder.py --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import forward, load_model, table, topics_text, write_json

from hf_kvcache import KVCache, PrefixStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--private", type=int, default=32, help="tokens of each beam")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--codec", help="the name of a codec")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model)
    longest = max(args.lengths) + args.private
    text = topics_text()[5000 : 5000 + 12 * longest]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :longest]
    store = PrefixStore(1 << 34, cache=lambda m: KVCache(m, codec=args.codec))
    caches = {}
    with torch.no_grad():
        for length in args.lengths:
            store.warm(model, ids[:, :length])
            shared = store.get(model, ids[:, : length + 1])
            copied = KVCache(model, codec=args.codec)
            for start in range(0, length, 1024):
                forward(model, ids[:, start : min(start + 1024, length)], copied)
            copied.batch_repeat_interleave(args.beams)
            for name, cache in (("shared", shared), ("copied", copied)):
                forward(model, ids[:, length : length + args.private].expand(args.beams, -1), cache)
                caches[name, length] = cache
    order = torch.arange(args.beams).roll(1)
    order[0] = order[-1]
    times: dict[tuple[str, int], list[float]] = {key: [] for key in caches}
    for _ in range(args.repeats + 2):
        for key, cache in caches.items():
            began = time.perf_counter()
            cache.reorder_cache(order)
            times[key].append(1000 * (time.perf_counter() - began))
    median = {key: statistics.median(values[2:]) for key, values in times.items()}
    rows = [
        {"prefix": length, "rows": name, "ms": median[name, length], "bytes": caches[name, length].nbytes}
        for name in ("shared", "copied")
        for length in args.lengths
    ]
    ratios = {name: median[name, max(args.lengths)] / median[name, min(args.lengths)] for name in ("shared", "copied")}
    print(f"{label}, {args.beams} beams, {torch.get_num_threads()} thread(s), median of {args.repeats}")
    print(table(rows))
    print(
        f"{max(args.lengths)} against {min(args.lengths)} tokens: "
        + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items())
    )
    write_json(args.json, {"model": label, "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
