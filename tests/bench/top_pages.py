"""Top pages: what reading a share of the pages costs in fidelity, in recall and in time.

A prompt is read once. Then, for each share, a cache is handed its keys and values, and the text's next tokens are fed
one at a time: mean KL in nats from the full cache's distribution, agreement on the likeliest token, and how many rows a
query reads, the resident ones included. Prompts with a planted code (see `hf_kvcache/evaluate/needles.py`) are
continued greedily; the figure is how many codes are found of those that the full cache finds.

    python tests/bench/top_pages.py
    python tests/bench/top_pages.py --tokens 2048 --windows 1 --needles 2 --shares 0.25 1.0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from common import TEXTS, DynamicCache, forward, load_model, table, track, window_ids, write_json

from hf_kvcache import CPUOffloadedCache
from hf_kvcache.evaluate.measure import compare
from hf_kvcache.evaluate.needles import ANSWER_TOKENS, make_needle

SHARES = [0.05, 0.1, 0.25, 0.5, 1.0]


class Read(NamedTuple):
    """A prompt that was read: keys and values of each layer, and the logits after it."""

    rows: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


@torch.no_grad()
def read(model: Any, ids: torch.Tensor) -> tuple[Read, DynamicCache]:
    full = DynamicCache(config=model.config)
    logits = forward(model, ids, full)[:, -1]
    # A DynamicCache grows by making new tensors, so these stay as they are.
    return Read([(layer.keys, layer.values) for layer in full.layers], logits), full


def handed(model: Any, prompt: Read, **arguments: Any) -> CPUOffloadedCache:
    """A cache with the prompt's rows, as if it had read it."""
    cache = CPUOffloadedCache(model, **arguments)
    for index, (keys, values) in enumerate(prompt.rows):
        cache.update(keys, values, index)
        cache.kept_length(index)  # ends the layer's step
    return cache


def rows_read(cache: CPUOffloadedCache) -> float:
    """Share of the rows that a query reads."""
    store, config = cache.kv_layers[0].segments, cache.offload
    assert config is not None
    pages = config.pages_of(store.length)
    return 1 - (pages - config.wanted(pages)) * config.page / store.length


@torch.no_grad()
def feed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` after each of `ids`."""
    return torch.stack([forward(model, ids[:, i : i + 1], cache)[0, -1] for i in range(ids.shape[1])])


@torch.no_grad()
def finds(model: Any, tokenizer: Any, cache: Any, logits: torch.Tensor, code: str) -> bool:
    out = [int(logits.argmax())]
    while len(out) < ANSWER_TOKENS:
        out.append(int(forward(model, torch.tensor([[out[-1]]]), cache)[0, -1].argmax()))
    return code in tokenizer.decode(out)


def windows(tokenizer: Any, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    for index in range(args.windows):
        yield window_ids(tokenizer, TEXTS[args.text](), 5_000 + 30_000 * index, args.tokens + args.steps + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--tokens", type=int, default=6144, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens that are fed after it")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--needles", type=int, default=10)
    parser.add_argument("--text", choices=list(TEXTS), default="topics")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--pages", nargs="+", type=int, default=[16, 64], help="tokens of a page")
    parser.add_argument("--resident", type=int, default=256, help="tokens that are always read")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model)
    kinds = [(page, share) for page in args.pages for share in args.shares]
    figures: dict[tuple[int, float], dict[str, list[float]]] = {k: {"kl": [], "top1": [], "found": []} for k in kinds}
    rows = dict.fromkeys(kinds, 1.0)

    def make(prompt: Read, kind: tuple[int, float]) -> CPUOffloadedCache:
        cache = handed(model, prompt, resident_length=args.resident, page=kind[0], top_pages=kind[1])
        rows[kind] = rows_read(cache)
        return cache

    for ids in track(list(windows(tokenizer, args)), "windows"):
        prompt, full = read(model, ids[:, : args.tokens])
        expected = feed(model, full, ids[:, args.tokens : -1])
        del full
        for kind in kinds:
            got = compare(
                expected, feed(model, make(prompt, kind), ids[:, args.tokens : -1]), ids[0, args.tokens + 1 :]
            )
            figures[kind]["kl"].append(got["kl"])
            figures[kind]["top1"].append(got["top1"])
    usable = 0
    for index in track(range(args.needles), "needles"):
        needle = make_needle(tokenizer, TEXTS[args.text](), index, args.needles, args.tokens)
        prompt, full = read(model, needle.ids)
        if not finds(model, tokenizer, full, prompt.logits, needle.code):
            continue
        usable += 1
        del full
        for kind in kinds:
            figures[kind]["found"].append(finds(model, tokenizer, make(prompt, kind), prompt.logits, needle.code))
    result = []
    for page, share in kinds:
        mine = figures[page, share]
        mean = {name: sum(mine[name]) / max(1, len(mine[name])) for name in ("kl", "top1")}
        found = f"{int(sum(mine['found']))}/{usable}"
        result.append({"page": page, "share": share, "rows read": rows[page, share]} | mean | {"codes found": found})
    print(f"{label}, {args.tokens} tokens, {args.windows} windows, {args.resident} resident tokens")
    print(table(result))
    write_json(args.json, {"model": label, "tokens": args.tokens, "rows": result})


if __name__ == "__main__":
    main()
