"""Time of `cache.reorder_cache` for beams over a prefix: a pool against buffers that are copied.

Every cache holds the same random rows, in the layer shapes of the model. Caches and lengths are interleaved; medians
over the repetitions, and the ratio of the longest prefix to the shortest. The step that follows (one token for each
beam, which copies the partly filled blocks that beams share) is timed too, without attention. `--decode` times whole
decoding steps of the model with beam search's reordering between them.

    python tests/bench/reorder_paged.py
    python tests/bench/reorder_paged.py --lengths 512 4096 --decode
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import load_model, table, write_json
from transformers import DynamicCache

from hf_kvcache import BlockPool, KVCache


def filled(cache: Any, config: Any, beams: int, tokens: int, dtype: torch.dtype) -> Any:
    """The cache with `tokens` random rows of a prompt that all beams begin with."""
    heads, dim = config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        rows = torch.randn(beams, heads, tokens, dim, dtype=dtype)
        cache.update(rows, rows, layer)
    if isinstance(cache, KVCache):
        for layer in cache.kv_layers:
            layer.settle()
    cache.reorder_cache(torch.zeros(beams, dtype=torch.long))
    return cache


def timed(fn: Any) -> float:
    began = time.perf_counter()
    fn()
    return 1000 * (time.perf_counter() - began)


def token(cache: Any, config: Any, beams: int, dtype: torch.dtype) -> None:
    """One token for each beam, in every layer; nothing is attended."""
    rows = torch.randn(beams, config.num_key_value_heads, 1, config.head_dim, dtype=dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(rows, rows, layer)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model, _, label = load_model(args.model, dtype)
    config = model.config.get_text_config(decoder=True)
    makers = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "KVCache": lambda: KVCache(model),
        "KVCache, pool": lambda: KVCache(model, pool=BlockPool()),
    }
    generator = torch.Generator().manual_seed(0)
    caches = {
        (name, n): filled(make(), config, args.beams, n, dtype) for n in args.lengths for name, make in makers.items()
    }
    reorder: dict[Any, list[float]] = {key: [] for key in caches}
    step: dict[Any, list[float]] = {key: [] for key in caches}
    for _ in range(args.steps + 3):
        order = torch.randint(0, args.beams, (args.beams,), generator=generator)
        for key, cache in caches.items():
            if args.decode:
                ids = torch.randint(0, config.vocab_size, (args.beams, 1), generator=generator)
                step[key].append(timed(lambda ids=ids, cache=cache: model(ids, past_key_values=cache)))
            else:
                step[key].append(timed(lambda cache=cache: token(cache, config, args.beams, dtype)))
            reorder[key].append(timed(lambda order=order, cache=cache: cache.reorder_cache(order)))
    median = {key: statistics.median(values[3:]) for key, values in reorder.items()}
    after = {key: statistics.median(values[3:]) for key, values in step.items()}
    short, long = min(args.lengths), max(args.lengths)
    rows = [
        {
            "cache": name,
            **{f"reorder, {n} tokens, ms": median[name, n] for n in args.lengths},
            "ratio": median[name, long] / median[name, short],
            **{f"{'step' if args.decode else 'append'}, {n} tokens, ms": after[name, n] for n in args.lengths},
        }
        for name in makers
    ]
    print(f"{label}, {args.dtype}, {args.beams} beams, {args.threads} thread(s), median of {args.steps}")
    print(table(rows))
    write_json(args.json, {"model": label, "beams": args.beams, "dtype": args.dtype, "rows": rows})


if __name__ == "__main__":
    main()
