"""A stream longer than the context: 20,000 tokens through a cache of constant size.

Text goes through `SlidingWindowCache(window_length=1020, num_sink_tokens=4)` in pieces of at most 64 tokens, the last
1,000 tokens one at a time. The perplexity of those is set against two others over the same tokens:

(a) recomputing: a fresh forward pass over the 1,024 tokens before each of them, without any cache;
(b) the same number of rows without sinks, `SlidingWindowCache(window_length=1024, num_sink_tokens=0)`.

(a) costs 1,024 tokens of work for each token. `--every 4` scores every fourth of the last tokens, the same ones for
all three figures.

    python tests/bench/streaming.py
    python tests/bench/streaming.py --every 10 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from common import SlidingWindowCache, forward, load_model, topics_text, track, write_json


@torch.no_grad()
def stream(
    model: Any, cache: Any, ids: torch.Tensor, last: int, chunk: int, marks: list[int], name: str
) -> tuple[torch.Tensor, dict[int, int]]:
    """Negative log-likelihood of each of the `last` tokens, and bytes held when each mark was passed."""
    total = ids.shape[1]
    sizes: dict[int, int] = {}
    # The logits after token i predict token i + 1.
    first = total - last - 1
    losses = []
    bounds = list(range(0, first, chunk)) + list(range(first, total - 1)) + [total - 1]
    for start, stop in track(list(zip(bounds, bounds[1:], strict=False)), name):
        keep = 1 if start >= first else 0
        logits = forward(model, ids[:, start:stop], cache)[:, -1]
        if keep:
            losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[:, stop]))
        for mark in marks:
            if mark not in sizes and stop >= mark - 1:
                sizes[mark] = cache.nbytes
    return torch.stack(losses), sizes


@torch.no_grad()
def recompute(model: Any, ids: torch.Tensor, targets: list[int], window: int, batch: int) -> torch.Tensor:
    """Negative log-likelihood of each target from a fresh pass over the `window` tokens before it."""
    losses = []
    for i in track(range(0, len(targets), batch), "recompute"):
        some = targets[i : i + batch]
        before = torch.cat([ids[:, t - window : t] for t in some])
        logits = model(before, use_cache=False, logits_to_keep=1).logits[:, -1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[0, some], reduction="none"))
    return torch.cat(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--last", type=int, default=1000, help="tokens whose perplexity is taken")
    parser.add_argument("--every", type=int, default=1, help="score only every so many of them")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="recomputed windows at once")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model, getattr(torch, args.dtype))
    text = topics_text()[5000 : 5000 + 12 * args.tokens]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]
    marks = [mark for mark in (2000, 10000, 20000) if mark <= args.tokens]
    targets = list(range(args.tokens - args.last, args.tokens, args.every))
    scored = torch.tensor(targets) - (args.tokens - args.last)

    nll: dict[str, torch.Tensor] = {}
    sizes: dict[str, dict[int, int]] = {}
    for name, sinks in (("sinks", args.sinks), ("no sinks", 0)):
        cache = SlidingWindowCache(model, window_length=args.rows - sinks, num_sink_tokens=sinks)
        losses, sizes[name] = stream(model, cache, ids, args.last, args.chunk, marks, name)
        nll[name] = losses[scored]
    nll["recompute"] = recompute(model, ids, targets, args.rows, args.batch)

    perplexity = {name: math.exp(float(losses.mean())) for name, losses in nll.items()}
    print(f"{label}, {args.dtype}, {args.tokens} tokens, perplexity over {len(targets)} of the last {args.last}:")
    print(f"  {args.sinks} sinks + {args.rows - args.sinks} rows   {perplexity['sinks']:.3f}")
    print(f"  recomputing {args.rows} tokens {perplexity['recompute']:.3f}")
    print(f"  {args.rows} rows, no sinks    {perplexity['no sinks']:.3f}")
    print(f"  sinks / recomputing     {perplexity['sinks'] / perplexity['recompute']:.3f}")
    print("  bytes " + ", ".join(f"{size:,} at {mark}" for mark, size in sizes["sinks"].items()))
    write_json(args.json, {"model": label, "perplexity": perplexity, "bytes": sizes, "scored": len(targets)})


if __name__ == "__main__":
    main()
