"""Fine-tuning with a fixed instruction template: what a step costs when the template is not computed again.

Two ways, each beside the same training on whole texts, step by step in turn:

- adapters (LoRA, with PEFT) in the last layer only, where reuse is exact: the losses are the same;
- adapters in every layer, where the template is computed anew every few steps and its own gradient is left out: an
  approximation, and the losses say how good a one.

    python examples/prefix_training.py --template-tokens 512 --steps 8
    python examples/prefix_training.py --tiny --steps 2     # a model of random weights, for a test
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from pydoc_data.topics import topics
from typing import Any

import torch

from hf_kvcache import prefix_training


def texts(tokenizer: Any, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums to learn: right-padded ids and mask."""
    numbers = torch.randint(10, 90, (count, 2), generator=generator).tolist()
    lines = [f"\nQuestion: what is {a} plus {b}? Answer: {a + b}." for a, b in numbers]
    rows = [list(line.encode()) if tokenizer is None else tokenizer(line).input_ids for line in lines]
    ids = torch.zeros(count, max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, : len(values)] = torch.tensor(values)
        mask[row, : len(values)] = 1
    return ids, mask


def on_whole_texts(model: Any, template: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss of a step that computes everything."""
    before = template.expand(len(ids), -1)
    labels = torch.cat([torch.full_like(before, -100), ids.masked_fill(mask == 0, -100)], dim=1)
    whole = torch.cat([torch.ones_like(before), mask], dim=1)
    return model(torch.cat([before, ids], dim=1), attention_mask=whole, labels=labels, use_cache=False).loss


def compare(base: Any, tokenizer: Any, template: torch.Tensor, args: Any, last_only: bool) -> dict[str, Any]:
    """Train two copies of the same adapters in turn; seconds of a step and losses of both."""
    from peft import LoraConfig, get_peft_model

    layers = base.config.num_hidden_layers
    # Below the last layer nothing moves; in it, the template's keys and values are made before the adapters.
    names = ["q_proj", "o_proj", "up_proj", "down_proj"] if last_only else ["q_proj", "v_proj"]
    config = LoraConfig(r=8, target_modules=names, layers_to_transform=[layers - 1] if last_only else None)
    torch.manual_seed(0)
    models = {name: copy.deepcopy(base) for name in ("whole", "prefix")}
    models = {name: get_peft_model(model, config).train() for name, model in models.items()}
    models["prefix"].load_state_dict(models["whole"].state_dict())
    prefix = prefix_training(models["prefix"], template, refresh_every=None if last_only else args.refresh_every)
    ways = {
        "whole": lambda ids, mask: on_whole_texts(models["whole"], template, ids, mask),
        "prefix": lambda ids, mask: prefix(ids, mask, labels=ids.masked_fill(mask == 0, -100)).loss,
    }
    optimizers = {n: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-3) for n, m in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        ids, mask = texts(tokenizer, args.batch, generator)
        for name, way in ways.items():
            began = time.perf_counter()
            loss = way(ids, mask)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.perf_counter() - began)
            losses[name].append(float(loss.detach()))
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    return {
        "exact": prefix.exact,
        "whole ms": 1000 * statistics.median(seconds["whole"]),
        "prefix ms": 1000 * statistics.median(seconds["prefix"]),
        "ratio": statistics.median(seconds["prefix"]) / statistics.median(seconds["whole"]),
        "first loss": losses["prefix"][0],
        "last loss": losses["prefix"][-1],
        "largest gap of losses": gap,
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Compare both ways and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--template-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--refresh-every", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    if args.tiny:
        from prefix_questions import tiny

        model, tokenizer = tiny()
    else:
        from demo_model import load

        model, tokenizer, _ = load(args.model)
    text = "\n".join(topics.values())[5000 : 5000 + 12 * args.template_tokens]
    ids = list(text.encode()) if tokenizer is None else tokenizer(text).input_ids
    template = torch.tensor([ids[: args.template_tokens]])
    print(f"a template of {template.shape[1]} tokens, batches of {args.batch}, medians of {args.steps} steps")
    results = []
    for last_only in (True, False):
        row = compare(model, tokenizer, template, args, last_only)
        results.append(row)
        where = "the last layer" if last_only else f"every layer, refreshed every {args.refresh_every} steps"
        print(f"\nadapters in {where} ({'exact' if row['exact'] else 'an approximation'})")
        print(
            f"  {row['whole ms']:.0f} ms a step on whole texts, {row['prefix ms']:.0f} ms reused ({row['ratio']:.2f})"
        )
        print(
            f"  loss {row['first loss']:.4f} -> {row['last loss']:.4f}; "
            f"losses differ by {row['largest gap of losses']:.2g}"
        )
    return results


if __name__ == "__main__":
    main()
