"""Prompts of different lengths in one batch, with beams: every row gives what it gives alone.

    python examples/batch_and_beams.py
    python examples/batch_and_beams.py --beams 1 --caches KVCache SlidingWindow
    python examples/batch_and_beams.py --model <a model of yours>

The rows are padded on the left, as ever. A cache that drops tokens by their place in the mask, or counts padding among
what it keeps, gives other text here than for each prompt alone; so do scores that padding takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import example_tools as tools
from hf_kvcache import BlockPool, KVCache, detach
from hf_kvcache.pictures import held_bytes

# All caches but the one whose layers would need training, and one more: its beams share the blocks of their prompt.
LEFT_OUT = "CrossLayerSharedCache"
POOLED = "KVCache, pool"


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = tools.arguments_of(__doc__ or "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[40, 150, 260], help="tokens of each prompt")
    parser.add_argument("--beams", type=int, default=3)
    parser.add_argument("--budget", type=int, default=64, help="tokens that a cache may keep (default: 64)")
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--caches", nargs="+", metavar="NAME", help="beginnings of names; all without")
    args = parser.parse_args(arguments)
    model, tokenizer, label = tools.load(args)
    prompts = [
        tools.text_ids(tokenizer, length, start=tools.SKIPPED_CHARACTERS + 3000 * row).to(model.device)
        for row, length in enumerate(args.lengths)
    ]
    width = max(args.lengths)
    batch = torch.full((len(prompts), width), model.generation_config.pad_token_id or 0, device=model.device)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, width - ids.shape[1] :] = ids
        mask[row, width - ids.shape[1] :] = 1
    settings: dict[str, Any] = dict(max_new_tokens=args.max_new_tokens, num_beams=args.beams, do_sample=False)
    settings["min_new_tokens"] = args.max_new_tokens  # so that all rows end alike
    caches = {name: make for name, make in tools.choose(args.caches).items() if not name.startswith(LEFT_OUT)}
    if not args.caches:
        caches[POOLED] = lambda model, budget: KVCache(model, pool=BlockPool(16))
    results: dict[str, dict[str, Any]] = {}
    with tools.progress(len(caches) * (1 + len(prompts)) * args.max_new_tokens) as advance:
        criteria = [tools.Ticker(advance)]
        for name, make in caches.items():
            advance(0, name)
            together = make(model, args.budget)
            output = model.generate(
                batch, attention_mask=mask, past_key_values=together, stopping_criteria=criteria, **settings
            )[:, width:]
            equal = 0
            for row, ids in enumerate(prompts):
                alone = make(model, args.budget)
                solo = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=alone,
                    stopping_criteria=criteria,
                    **settings,
                )[0, ids.shape[1] :]
                equal += torch.equal(solo, output[row])
            results[name] = dict(equal=equal, nbytes=held_bytes(together), text=tokenizer.decode(output[0]))
            detach(model)  # the next one starts from the model as it came
    print(f"{label}: {len(prompts)} prompts of {args.lengths} tokens, {args.beams} beams, budget {args.budget}\n")
    rows = [
        [name, f"{row['equal']} of {len(prompts)}", tools.megabytes(row["nbytes"])] for name, row in results.items()
    ]
    tools.show(["cache", "rows as alone", "held"], rows)
    print("\nthe first row continues")
    for name, row in results.items():
        print(f"  {name:<30} {tools.shorten(row['text'])!r}")
    return results


if __name__ == "__main__":
    main()
