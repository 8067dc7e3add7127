"""Heal a model whose layers share keys and values: LoRA, a few hundred steps, perplexity before and after.

    python examples/heal_shared.py
    python examples/heal_shared.py --layers 15 --steps 400 --save healed/

Layers that can do with the rows of earlier ones are found on a few texts (`--sharing 2` takes adjacent pairs instead).
While the patch is applied the model's own forward pass shares, so training needs no cache: gradients of a follower flow
into its source's keys and values. The adapters learn to predict what the unshared model predicts, on docstrings of the
standard library; perplexity is that of `pydoc`'s topics, before and after, through a `CrossLayerSharedCache`.

Needs peft: `pip install "hf-kvcache[train]"`.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from demo_model import load
from hf_kvcache import CrossLayerSharedCache, KVCache, find_sharing
from hf_kvcache.evaluate.texts import TEXTS

try:
    from hf_kvcache.patches.cross_layer import apply
except ImportError:  # a checkout that is not installed
    from patches.cross_layer import apply

EVALUATION_TOKENS = 512


def windows(tokenizer: Any, text: str, count: int, tokens: int, skip: int = 5_000) -> list[torch.Tensor]:
    """`count` windows `[1, tokens]` spread over the text."""
    stride = max(1, (len(text) - skip - 8 * tokens) // count)
    parts = (text[skip + stride * n :][: 12 * tokens] for n in range(count))
    ids = [tokenizer(part, return_tensors="pt").input_ids[:, :tokens] for part in parts]
    return [part for part in ids if part.shape[1] == tokens]


@torch.no_grad()
def perplexity(model: Any, texts: Sequence[torch.Tensor], sharing: Any) -> float:
    """Of whole windows, teacher-forced, through a cache that shares (or not, with None)."""
    model.eval()
    nats = 0.0
    for ids in texts:
        cache = KVCache(model) if sharing is None else CrossLayerSharedCache(model, sharing)
        logits = model(input_ids=ids, past_key_values=cache).logits[0, :-1]
        nats += float(nn.functional.cross_entropy(logits.float(), ids[0, 1:])) / len(texts)
    return float(torch.tensor(nats).exp())


def adapters(model: Any, sharing: dict[int, int], rank: int) -> Any:
    """`model` with LoRA on everything but the projections that followers no longer use."""
    from peft import LoraConfig, get_peft_model

    layers = range(model.config.num_hidden_layers)
    own = "|".join(str(layer) for layer in layers if layer not in sharing)
    targets = rf".*\.(self_attn\.[qo]_proj|mlp\.(gate|up|down)_proj)|.*layers\.({own})\.self_attn\.[kv]_proj"
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, lora_dropout=0.0))


def heal(
    model: Any,
    sharing: dict[int, int],
    texts: Sequence[torch.Tensor],
    steps: int,
    rate: float = 1e-3,
    rank: int = 16,
    track: Any = lambda items, description: items,
) -> tuple[Any, Any, list[float]]:
    """LoRA on the shared model, towards the predictions of the unshared one.

    Returns the model with its adapters, the function that stops the sharing, and the loss of each step (nats a token).
    """
    teacher = copy.deepcopy(model).eval()
    student = adapters(model, sharing, rank)
    undo = apply(student, sharing)
    optimizer = torch.optim.AdamW((p for p in student.parameters() if p.requires_grad), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    losses = []
    student.train()
    for step in track(range(steps), "healing"):
        ids = texts[step % len(texts)]
        with torch.no_grad():
            wanted = teacher(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        got = student(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        loss = nn.functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_((p for p in student.parameters() if p.requires_grad), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    student.eval()
    return student, undo, losses


def _track(items: Iterable[Any], description: str) -> Iterable[Any]:
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    return track(items, description=description, console=Console(stderr=True), transient=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--layers", type=int, default=9, help="layers that shall follow others, found by their effect")
    parser.add_argument("--sharing", type=int, help="share adjacent groups of so many layers instead")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of a training window, one a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--save", help="a folder for the adapters")
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    model, tokenizer, label = load(args.model, torch.float32)
    held_out = windows(tokenizer, TEXTS["topics"](), 4, EVALUATION_TOKENS)
    training = windows(tokenizer, TEXTS["docstrings"](), min(args.steps, 400), args.tokens)
    if args.sharing is None:
        found = find_sharing(model, training[:: max(1, len(training) // 2)][:2], args.layers, sources=1, tries=2)
        sharing = found.map
    else:
        sharing = CrossLayerSharedCache(model, args.sharing).sharing or {}
    names = ", ".join(f"{follower} <- {source}" for follower, source in sharing.items())
    print(f"{label}: {len(sharing)} of {model.config.num_hidden_layers} layers share ({names})")
    result = {"unshared": perplexity(model, held_out, None), "before": perplexity(model, held_out, sharing)}
    print(f"perplexity {result['unshared']:.2f} unshared, {result['before']:.2f} shared")
    began = time.perf_counter()
    healed, undo, losses = heal(model, sharing, training, args.steps, args.rate, args.rank, _track)
    result["after"] = perplexity(healed, held_out, sharing)
    result["minutes"] = (time.perf_counter() - began) / 60
    last = losses[-max(1, len(losses) // 10) :]
    result["loss"] = sum(last) / len(last)
    print(
        f"perplexity {result['after']:.2f} after {args.steps} steps of LoRA ({result['minutes']:.1f} minutes; the last "
        f"tenth of the steps at {result['loss']:.3f} nats from the unshared model)"
    )
    if args.save:
        healed.save_pretrained(args.save)
        print(f"adapters in {args.save}; use them with CrossLayerSharedCache(model, sharing={sharing})")
    undo()
    return result


if __name__ == "__main__":
    main()
