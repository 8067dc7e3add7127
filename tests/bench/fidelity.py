"""Fidelity of caches that drop tokens: how far their predictions are from the full cache's.

A 4,096-token prompt goes through the cache, then 48 more tokens of the text are fed one at a time, in float32. Measured
over these steps, against a `DynamicCache` that was fed the same: the mean Kullback-Leibler divergence in nats (from
the full distribution to the cache's), how often both name the same next token, and the perplexity. Bytes are
`cache.nbytes` as a share of the `DynamicCache`'s bytes, after the prompt and after the last step.

Windows start at character 5,000 + 30,000 * w of each text.

    python tests/bench/fidelity.py
    python tests/bench/fidelity.py --caches snapkv:pooling=maxpool h2o --budgets 0.25 --json fidelity.json
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import (
    CACHES,
    TEXTS,
    forward,
    full_nbytes,
    load_model,
    make_cache,
    read_prompt,
    table,
    track,
    window_ids,
    write_json,
)


@torch.no_grad()
def decode(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[tokens, vocabulary]` after each of `ids` `[1, tokens]`, fed one at a time."""
    steps = [forward(model, ids[:, i : i + 1], cache)[0, -1] for i in range(ids.shape[1])]
    return torch.stack(steps).float().log_softmax(-1)


def measure(
    model: Any, ids: torch.Tensor, prompt: int, specs: list[tuple[str, int]], separate: bool
) -> list[dict[str, Any]]:
    """One row of sums for each `spec -> rows` on one window of text, `full` first."""
    caches = {(spec, rows): make_cache(model, spec, rows) for spec, rows in specs}
    _, full = read_prompt(model, ids[:, :prompt], [] if separate else caches.values())
    if separate:
        for cache in caches.values():
            with torch.no_grad():
                forward(model, ids[:, :prompt], cache)
    after_prompt = {key: cache.nbytes / full_nbytes(full) for key, cache in caches.items()}
    fed, targets = ids[:, prompt:-1], ids[0, prompt + 1 :]
    want = decode(model, full, fed)
    index = torch.arange(len(targets))
    result = [{"nll": -want[index, targets].mean().item()}]
    for key, cache in caches.items():
        got = decode(model, cache, fed)
        result.append(
            {
                "kl": (want.exp() * (want - got)).sum(-1).mean().item(),
                "top1": (want.argmax(-1) == got.argmax(-1)).float().mean().item(),
                "nll": -got[index, targets].mean().item(),
                "bytes": after_prompt[key],
                "bytes at the end": cache.nbytes / full_nbytes(full),
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--windows", type=int, default=2, help="windows of each text")
    parser.add_argument("--texts", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.125], help="shares of the prompt")
    parser.add_argument("--caches", nargs="+", default=CACHES, help="snapkv, h2o, window, with `:name=value,...`")
    parser.add_argument("--separate", action="store_true", help="a prompt pass for each cache (slow, same figures)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model)
    specs = [(spec, int(args.prompt * budget)) for budget in args.budgets for spec in args.caches]
    windows = [(text, w) for text in args.texts for w in range(args.windows)]
    measured = []
    for name, w in track(windows, "windows"):
        ids = window_ids(tokenizer, TEXTS[name](), 5000 + 30000 * w, args.prompt + args.tokens + 1)
        measured.append(measure(model, ids, args.prompt, specs, args.separate))

    def mean(index: int, what: str, text: str | None = None) -> float:
        chosen = [m[index][what] for m, (name, _) in zip(measured, windows, strict=True) if text in (None, name)]
        return sum(chosen) / len(chosen)

    full = {"perplexity": torch.tensor(mean(0, "nll")).exp().item()}
    rows = []
    for index, (spec, kept) in enumerate(specs, start=1):
        row: dict[str, Any] = {"rows": f"{kept / args.prompt:.1%}", "cache": spec, "kl": mean(index, "kl")}
        row |= {f"kl {name}": mean(index, "kl", name) for name in args.texts}
        row["top1"] = mean(index, "top1")
        row["perplexity"] = torch.tensor(mean(index, "nll")).exp().item()
        row |= {what: mean(index, what) for what in ("bytes", "bytes at the end")}
        rows.append(row)
    print(f"{label}, prompts of {args.prompt} tokens + {args.tokens}, full perplexity {full['perplexity']:.2f}")
    print(table(rows))
    write_json(args.json, {"model": label, "full": full, "rows": rows, "windows": measured})


if __name__ == "__main__":
    main()
