"""A conversation of several turns in one cache: what is held after each turn, and what it would be without.

    python examples/multi_turn_chat.py
    python examples/multi_turn_chat.py --cache HeavyHitter --budget 128 --plot memory.png
    python examples/multi_turn_chat.py --model <a chat model of yours> --say "Hello!" "What did I say first?"

The whole conversation is passed to `generate` at every turn, as ever: it counts the tokens that the cache has seen and
reads only the rest. The caches that drop tokens keep `--budget` of them, and positions stay right.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import example_tools as tools
from hf_kvcache.pictures import MemoryRecorder, plot_memory

TURNS = (
    "My name is Ada and I live in Oslo. Please name three things to see there.",
    "Which of them is best when it rains?",
    "Write one sentence that I can send to a friend about it.",
    "What is my name, and where do I live?",
)


MARK = "@@@"


def turn_ids(tokenizer: Any, text: str, so_far: torch.Tensor) -> torch.Tensor:
    """Ids `[1, T]` that follow `so_far`: the end of the last answer, and what the user says now."""
    first = so_far.shape[1] == 0
    if not getattr(tokenizer, "chat_template", None):
        return tools.encode(tokenizer, f"{'' if first else chr(10)}User: {text}\nAssistant:")
    messages = [{"role": "user", "content": text}]
    if not first:
        # Rendered after a stand-in for what was said, of which only the end of the answer is taken.
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}, *messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tools.encode(tokenizer, whole.rpartition(MARK)[2] if not first else whole)
    # An answer that was not cut off has its end token already.
    return ids[:, 1:] if not first and ids[0, 0] == so_far[0, -1] else ids


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = tools.arguments_of(__doc__ or "")
    parser.add_argument("--cache", default="SnapKVCache", help="beginning of a name: " + ", ".join(tools.CACHES))
    parser.add_argument("--budget", type=int, default=96, help="tokens that a cache may keep (default: 96)")
    parser.add_argument("--say", nargs="+", metavar="TEXT", default=list(TURNS), help="what the user says, in turn")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of each answer (default: 48)")
    parser.add_argument("--plot", metavar="PNG", help="draw the memory over the conversation")
    args = parser.parse_args(arguments)
    name, make = list(tools.choose([args.cache]).items())[-1]
    model, tokenizer, label = tools.load(args)
    cache = make(model, args.budget)
    recorder = MemoryRecorder(cache)
    print(f"{label}: {len(args.say)} turns through {name}\n")
    ids = torch.empty(1, 0, dtype=torch.long, device=model.device)
    results: list[dict[str, Any]] = []
    with tools.progress(len(args.say) * args.max_new_tokens) as advance:
        for number, text in enumerate(args.say, start=1):
            advance(0, f"turn {number}")
            ids = torch.cat([ids, turn_ids(tokenizer, text, ids).to(model.device)], dim=1)
            began, before = time.perf_counter(), ids.shape[1]
            ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=args.max_new_tokens,
                do_sample=False,
                stopping_criteria=[recorder, tools.Ticker(advance)],
            )
            seconds = time.perf_counter() - began
            answer = tokenizer.decode(ids[0, before:], skip_special_tokens=True)
            now = recorder.record()
            results.append(dict(turn=number, answer=answer, seconds=seconds, row=now, tokens=ids.shape[1]))
            print(f"> {text}\n{answer.strip()}\n")
    head = ["turn", "seen", "kept", "held", "full cache", "share", "seconds"]
    rows = []
    for result in results:
        row = result["row"]
        rows.append(
            [result["turn"], row.seen, row.kept, tools.megabytes(row.nbytes), tools.megabytes(row.full_bytes)]
            + [f"{row.nbytes / row.full_bytes:.2f}", f"{result['seconds']:.2f}"]
        )
    tools.show(head, rows)
    if args.plot:
        plot_memory({name: recorder}, args.plot)
    return results


if __name__ == "__main__":
    main()
