"""Recall of planted facts: which five-digit codes a cache still finds in a long prompt.

Each prompt is text with one sentence in it, "The secret pass code of Oslo is 48213.", and ends with "The secret pass
code of Oslo is": five depths, four cities and codes at each, all different, every prompt with text of its own. The
greedy continuation must contain the five digits. The figure is the share of the codes that the full cache finds.

A window that keeps the last rows finds what lies in them and nothing else, which shows that the prompts measure
selection; the table therefore counts codes that lie inside the last rows apart from those that lie before them.

    python tests/bench/recall.py
    python tests/bench/recall.py --caches snapkv:pooling=maxpool,window_size=16 --budgets 0.25
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from common import CACHES, TEXTS, forward, full_nbytes, load_model, make_cache, read_prompt, table, track, write_json

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CITIES = (
    "Oslo Lima Cairo Paris Quito Tokyo Delhi Dublin Vienna Madrid Havana Nairobi Athens Lisbon Prague Seoul Accra "
    "Berlin Warsaw Rome"
).split()


class Prompt(NamedTuple):
    """A prompt with a code planted in it."""

    ids: torch.Tensor  # [1, tokens]
    code: str
    depth: float
    distance: int  # tokens from the first of the planted sentence to the end of the prompt


def code_of(index: int) -> str:
    """Five different-looking digits for prompt `index`."""
    return str(10007 + (index * 37813 + 38206) % 89989)


def make_prompt(tokenizer: Any, text: str, index: int, tokens: int) -> Prompt:
    """Prompt `index` of the set: depth `index // 4`."""
    city, code, depth = CITIES[index], code_of(index), DEPTHS[index // 4]
    start = 5000 + index * (len(text) - 20000 - 12 * tokens) // len(CITIES)
    fact = tokenizer(f" The secret pass code of {city} is {code}.", add_special_tokens=False).input_ids
    question = tokenizer(f"\n\nThe secret pass code of {city} is", add_special_tokens=False).input_ids
    body = tokenizer(text[start : start + 12 * tokens], add_special_tokens=False).input_ids
    body = body[: tokens - len(fact) - len(question)]
    place = int(depth * len(body))
    while place > 1 and not tokenizer.decode(body[place - 1 : place]).rstrip(" ").endswith((".", "\n")):
        place -= 1  # between two sentences
    ids = body[:place] + fact + body[place:] + question
    return Prompt(torch.tensor([ids]), code, depth, len(ids) - place)


@torch.no_grad()
def continues(model: Any, tokenizer: Any, cache: Any, logits: torch.Tensor, tokens: int = 8) -> str:
    """The greedy continuation of a prompt that `cache` holds and that ended in `logits`."""
    out = [int(logits.argmax())]
    while len(out) < tokens:
        out.append(int(forward(model, torch.tensor([[out[-1]]]), cache)[0, -1].argmax()))
    return tokenizer.decode(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--prompts", type=int, default=len(CITIES), help="use only the first so many")
    parser.add_argument("--text", choices=list(TEXTS), default="topics")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25], help="shares of the prompt")
    parser.add_argument("--caches", nargs="+", default=CACHES, help="snapkv, h2o, window, with `:name=value,...`")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model)
    specs = [(spec, int(args.tokens * budget)) for budget in args.budgets for spec in args.caches]
    prompts = [make_prompt(tokenizer, TEXTS[args.text](), i, args.tokens) for i in range(args.prompts)]
    full_found: list[bool] = []
    found: list[list[bool]] = []
    share = [0.0] * len(specs)
    for prompt in track(prompts, "prompts"):
        caches = [make_cache(model, spec, rows) for spec, rows in specs]
        logits, full = read_prompt(model, prompt.ids, caches)
        share = [max(s, cache.nbytes / full_nbytes(full)) for s, cache in zip(share, caches, strict=True)]
        full_found.append(prompt.code in continues(model, tokenizer, full, logits))
        found.append([prompt.code in continues(model, tokenizer, cache, logits) for cache in caches])

    usable = [i for i, ok in enumerate(full_found) if ok]
    rows = []
    for column, (spec, kept) in enumerate(specs):
        hits = [found[i][column] for i in usable]
        inside = [prompts[i].distance <= kept for i in usable]
        row: dict[str, Any] = {
            "rows": f"{kept / args.tokens:.1%}",
            "cache": spec,
            "recall": sum(hits) / max(1, len(usable)),
            "found": f"{sum(hits)}/{len(usable)}",
            "in the last rows": f"{sum(h and i for h, i in zip(hits, inside, strict=True))}/{sum(inside)}",
            "before them": f"{sum(h and not i for h, i in zip(hits, inside, strict=True))}/{len(usable) - sum(inside)}",
            "bytes": share[column],
        }
        rows.append(row)
    print(f"{label}, {args.tokens} tokens: the full cache finds {len(usable)} of {len(prompts)} codes")
    print(table(rows))
    detail = [{"depth": p.depth, "code": p.code, "full": ok} for p, ok in zip(prompts, full_found, strict=True)]
    result = {"model": label, "tokens": args.tokens, "rows": rows, "prompts": detail}
    write_json(args.json, result | {"found": [list(map(bool, f)) for f in found]})


if __name__ == "__main__":
    main()
