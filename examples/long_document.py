"""Questions about facts in a long document, with every cache: bytes held, time, and whether the answer is right.

    python examples/long_document.py
    python examples/long_document.py --context-tokens 4000 --budget 0.125 --caches KVCache SnapKV
    python examples/long_document.py --model <a model of yours> --plot-kept kept.png

Three sentences are planted in the document, near its beginning, middle and end. Every cache
reads the document with each question after it (a `PrefixStore` reads the document once for all of them) and answers
greedily. Where a share of the tokens is kept, it is `--budget`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import example_tools as tools
from hf_kvcache import PrefixStore, detach
from hf_kvcache.pictures import held_bytes, kept_rows

# A sentence up to its answer, and the answer; they are planted at these depths.
FACTS = {
    "The secret pass code of Oslo is": "48213",
    "The favourite fruit of Professor Lindqvist is the": "papaya",
    "The meeting with the ambassador takes place in": "Zanzibar",
}
DEPTHS = (0.1, 0.5, 0.9)


def document_of(tokenizer: Any, tokens: int) -> torch.Tensor:
    """`[1, tokens]`: text with the sentences in it."""
    facts = [tools.encode(tokenizer, f"\n\n{stem} {answer}.\n\n") for stem, answer in FACTS.items()]
    room = tokens - sum(fact.shape[1] for fact in facts)
    if room < 100:
        raise SystemExit(f"--context-tokens must be at least {tokens - room + 100} with this model")
    text = tools.text_ids(tokenizer, room)
    parts, last = [], 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        parts += [text[:, last : int(depth * room)], fact]
        last = int(depth * room)
    return torch.cat([*parts, text[:, last:]], dim=1)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = tools.arguments_of(__doc__ or "")
    parser.add_argument("--context-tokens", type=int, default=1000, help="length of the document (default: 1000)")
    parser.add_argument("--budget", type=float, default=0.25, help="share of the tokens to keep (default: 0.25)")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--caches", nargs="+", metavar="NAME", help="beginnings of names; all without")
    parser.add_argument("--plot-kept", metavar="PNG", help="draw what SnapKVCache keeps of the last prompt")
    args = parser.parse_args(arguments)
    if not 0 < args.budget <= 1:
        parser.error(f"--budget is a share, above 0 and at most 1, got {args.budget}")
    model, tokenizer, label = tools.load(args)
    document = document_of(tokenizer, args.context_tokens).to(model.device)
    budget = max(48, round(args.budget * args.context_tokens))
    prompts = {
        stem: torch.cat([document, tools.encode(tokenizer, f"\n\n{stem}", model.device)], dim=1) for stem in FACTS
    }
    settings: dict[str, Any] = dict(max_new_tokens=args.max_new_tokens, do_sample=False)
    caches = tools.choose(args.caches)
    results: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}

    def note(name: str, answers: dict[str, str], seconds: float, nbytes: int, kept: str) -> None:
        right = [stem for stem, answer in answers.items() if FACTS[stem] in answer]
        results[name] = dict(right=right, answers=answers, seconds=seconds, nbytes=nbytes, kept=kept)

    with tools.progress(len(FACTS) * (len(caches) + 1)) as advance:
        for name, make in caches.items():
            answers: dict[str, str] = {}
            began = time.perf_counter()
            try:
                for stem, ids in prompts.items():
                    advance(0, name)
                    cache = make(model, budget)
                    output = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings)
                    answers[stem] = tokenizer.decode(output[0, ids.shape[1] :])
                    advance()
            except (NotImplementedError, ValueError) as error:  # not every technique fits every model
                refused[name] = str(error)
                advance(len(FACTS) - len(answers))
                continue
            finally:
                detach(model)  # the next one starts from the model as it came
            seen = int(cache.get_seq_length())
            seconds = (time.perf_counter() - began) / len(FACTS)
            note(name, answers, seconds, held_bytes(cache), f"{kept_rows(cache)}/{seen}")
            if args.plot_kept and name == "SnapKVCache":
                cache.plot_kept(args.plot_kept)
        if not args.caches:
            answers, store = {}, PrefixStore(max_bytes=1 << 34)
            began = time.perf_counter()
            advance(0, "PrefixStore")
            store.warm(model, document)
            for stem, ids in prompts.items():
                output = store.generate(model, ids, **settings)
                answers[stem] = tokenizer.decode(output[0, ids.shape[1] :])
                advance()
            seconds = (time.perf_counter() - began) / len(FACTS)
            note("PrefixStore over KVCache", answers, seconds, store.nbytes, "once")
            detach(model)

    full = next(iter(results.values()))
    print(f"{label}: {args.context_tokens} tokens, budget {budget}, {len(FACTS)} questions\n")
    rows = [
        [name, row["kept"], tools.megabytes(row["nbytes"]), f"{row['nbytes'] / full['nbytes']:.2f}"]
        + [f"{row['seconds']:.2f} s", f"{len(row['right'])} of {len(FACTS)}"]
        for name, row in results.items()
    ]
    tools.show(["cache", "kept/seen", "held", "share", "an answer in", "right"], rows)
    print("\nTo be completed (planted at):")
    for stem, depth in zip(FACTS, DEPTHS, strict=True):
        print(f"  {stem} ... ({depth:.0%})")
    for name, row in results.items():
        print(f"{name:<30}" + " | ".join(tools.shorten(answer, 20) for answer in row["answers"].values()))
    for name, reason in refused.items():
        print(f"{name:<30}refused: {reason}")
    return results


if __name__ == "__main__":
    main()
