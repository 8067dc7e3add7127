"""Draft-model and prompt-lookup decoding through a cache: how many drafts are accepted, and that the text is the same.

    python examples/draft_decoding.py
    python examples/draft_decoding.py --draft <a small model with the same tokenizer> --caches KVCache
    python examples/draft_decoding.py --skip 12 13 14

The model checks several drafted tokens in one pass, and the cache rolls back those that it rejects. The draft is a
model of yours, or without one the model itself without some of its layers (`--skip`); prompt lookup drafts what
followed the same words earlier in the prompt, and needs no model.

Where every token stays, the text is that of plain decoding. A cache that drops tokens can give another: transformers
checks the first draft in one step with the prompt, so what is kept of the prompt is chosen with other words at its end.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch

import example_tools as tools
from hf_kvcache import detach
from hf_kvcache.pictures import held_bytes

PROMPT = """Here is a function, and below it the same function with the name `total` changed to `amount`.

def pay(items, rate):
    total = 0
    for item in items:
        total = total + item.price * item.count
    total = total * (1 + rate)
    print("total", total)
    return total

def pay(items, rate):
    amount = 0
    for item in items:
"""
CACHES = ("KVCache", "SnapKVCache", "QuantizedKIVICache")


def without_layers(model: Any, skipped: Sequence[int]) -> Any:
    """A copy of a decoder without some layers: a draft that needs no training, and shares the tokenizer."""
    draft = copy.deepcopy(model)
    kept = [layer for index, layer in enumerate(draft.model.layers) if index not in skipped]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    draft.model.layers = torch.nn.ModuleList(kept)
    draft.config.num_hidden_layers = len(kept)
    if getattr(draft.config, "layer_types", None):
        draft.config.layer_types = [kind for n, kind in enumerate(draft.config.layer_types) if n not in skipped]
    return draft


class Passes:
    """Counts the forward passes of a model while it is open."""

    def __init__(self, model: Any) -> None:
        self.model, self.count = model, 0

    def __enter__(self) -> Passes:
        self._hook = self.model.register_forward_hook(self._add)
        return self

    def _add(self, *_: Any) -> None:
        self.count += 1

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = tools.arguments_of(__doc__ or "")
    parser.add_argument("--draft", help="a Hub id or folder of a small model with the same tokenizer")
    parser.add_argument("--skip", type=int, nargs="+", metavar="LAYER", help="layers that the draft does without")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--budget", type=int, default=64, help="tokens that a cache may keep (default: 64)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--caches", nargs="+", metavar="NAME", default=list(CACHES), help="beginnings of names")
    args = parser.parse_args(arguments)
    model, tokenizer, label = tools.load(args)
    if args.draft:
        from transformers import AutoModelForCausalLM

        draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.float32).eval().to(model.device)
        what = args.draft
    else:
        layers = len(model.model.layers)
        skipped = args.skip or [layers // 2]
        if not all(0 <= layer < layers for layer in skipped):
            parser.error(f"--skip takes layers from 0 to {layers - 1}, got {skipped}")
        draft = without_layers(model, skipped)
        what = f"the model without {len(skipped)} of its {layers} layers"
    ids = tools.encode(tokenizer, args.prompt, model.device)
    settings: dict[str, Any] = dict(max_new_tokens=args.max_new_tokens, do_sample=False)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "draft model": dict(assistant_model=draft),
        "prompt lookup": dict(prompt_lookup_num_tokens=5),
    }
    caches = tools.choose(args.caches)
    results: list[dict[str, Any]] = []
    with tools.progress(len(caches) * len(ways)) as advance:
        for name, make in caches.items():
            plain = None
            for way, extra in ways.items():
                advance(0, f"{name}, {way}")
                cache = make(model, args.budget)
                began = time.perf_counter()
                with Passes(model) as passes:
                    output = model.generate(
                        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings, **extra
                    )
                seconds = time.perf_counter() - began
                plain = output if plain is None else plain
                new = output.shape[1] - ids.shape[1]
                # Each pass gives one token of the model's own; whatever is more was drafted and accepted.
                results.append(
                    dict(cache=name, way=way, new=new, passes=passes.count, accepted=new - passes.count)
                    | dict(equal=torch.equal(output, plain), nbytes=held_bytes(cache), seconds=seconds)
                )
                advance()
            detach(model)  # the next one starts from the model as it came
    print(f"{label}: {ids.shape[1]} tokens of prompt, {args.max_new_tokens} to come; the draft is {what}\n")
    rows = [
        [row["cache"], row["way"], row["new"], row["passes"], row["accepted"], f"{row['new'] / row['passes']:.2f}"]
        + ["yes" if row["equal"] else "NO", tools.megabytes(row["nbytes"]), f"{row['seconds']:.2f} s"]
        for row in results
    ]
    head = ["cache", "decoding", "tokens", "passes", "accepted", "a pass", "same text", "held", "time"]
    tools.show(head, rows)
    assert plain is not None
    print("\n" + tokenizer.decode(plain[0, ids.shape[1] :]))
    return results


if __name__ == "__main__":
    main()
