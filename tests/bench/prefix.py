"""Time to the first token of questions that share a long system prompt: a cold cache against a `PrefixStore`.

Each question is asked of both in turn, so that whatever else the machine does falls on both alike. The first question
fills the store; the medians are of the later ones. Answers are compared too.

    python tests/bench/prefix.py --threads 1
    python tests/bench/prefix.py --path /tmp/prefixes      # and again: hits from disk
    python tests/bench/prefix.py --codec rotated-4
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import load_model, table, topics_text, write_json
from transformers.generation.streamers import BaseStreamer

from hf_kvcache import KVCache, PrefixStore

QUESTIONS = [
    "What is this text about?",
    "Which statement assigns a name to an object?",
    "How does one write a literal string?",
    "What does a try statement do?",
    "Name one thing that can be called.",
    "What is an iterator?",
    "When is a name bound?",
    "Which operator has the lowest priority?",
]


class Clock(BaseStreamer):
    """Notes when each piece of the output arrives: the prompt first, then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def ask(run: Any, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
    """The answer's ids, and the seconds until the first of them."""
    clock = Clock()
    began = time.perf_counter()
    answer = run(ids, max_new_tokens=tokens, do_sample=False, streamer=clock)[:, ids.shape[1] :]
    return answer, clock.times[1] - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--answer", type=int, default=12, help="tokens of each answer")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--codec", help="the name of a codec; answers then equal those of the same cache on a second turn"
    )
    parser.add_argument("--path", help="a folder or URL of the store's files")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, label = load_model(args.model, getattr(torch, args.dtype))
    text = topics_text()[5000 : 5000 + 12 * args.tokens]
    system = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]
    store = PrefixStore(1 << 32, path=args.path, cache=lambda m: KVCache(m, codec=args.codec))

    def cold(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        cache = KVCache(model, codec=args.codec)
        if args.codec is not None:  # packed before the question sees it, as in the store
            with torch.no_grad():
                model(system, past_key_values=cache, logits_to_keep=1)
        return model.generate(ids, past_key_values=cache, **kwargs)

    def warm(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return store.generate(model, ids, **kwargs)

    if args.codec is not None:
        store.warm(model, system)
    rows, times = [], {"cold": [], "store": []}
    for question in QUESTIONS[: args.questions]:
        own = tokenizer(f"\n\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids
        ids = torch.cat([system, own], dim=1)
        expected, slow = ask(cold, ids, args.answer)
        answer, fast = ask(warm, ids, args.answer)
        times["cold"].append(slow)
        times["store"].append(fast)
        equal = bool(torch.equal(expected, answer))
        rows.append({"question": question, "cold ms": 1000 * slow, "store ms": 1000 * fast, "answers equal": equal})
    later = {name: statistics.median(values[1:]) for name, values in times.items()}
    ratio = later["store"] / later["cold"]
    print(f"{label}, {args.dtype}, {args.tokens} tokens of system prompt, {torch.get_num_threads()} thread(s)")
    print(table(rows))
    print(
        f"median of the later questions: {1000 * later['cold']:.0f} ms cold, "
        f"{1000 * later['store']:.0f} ms with the store ({ratio:.3f})"
    )
    print(store)
    write_json(args.json, {"model": label, "tokens": args.tokens, "ratio": ratio, "rows": rows, "stats": store.stats()})


if __name__ == "__main__":
    main()
