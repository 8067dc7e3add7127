"""Convert a grouped-query model to multi-head latent attention: bytes of a token, perplexity, text, before and after.

    python examples/mla_conversion.py
    python examples/mla_conversion.py --keep 0.5 --save converted/
    python examples/mla_conversion.py --model <a model of yours> --windows 8 --window-tokens 1024

No training: a calibration pass over docstrings of the standard library and linear algebra. The converted model attends
to its latents as they are cached (`enable_absorb`), and a codec packs those too. Perplexity is that of `pydoc`'s
topics, which calibration does not see. `heal_mla_qlora.py` wins back what the conversion loses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import example_tools as tools
from hf_kvcache import KVCache, convert_to_mla, enable_absorb

BEGINNING = "The capital of France is Paris. The capital of Italy is"


@torch.no_grad()
def perplexity(model: Any, windows: Sequence[torch.Tensor], codec: str | None = None) -> tuple[float, float]:
    """Of windows `[1, T]`: half goes through the cache in one call, then 32 tokens at a time. And bytes of a token."""
    nats, held = [], 0.0
    for ids in windows:
        cache = KVCache(model, codec=codec)
        half = ids.shape[1] // 2
        pieces = [ids[:, :half], *ids[:, half:].split(32, dim=1)]
        logits = torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)
        nats.append(float(nn.functional.cross_entropy(logits[0, half - 1 : -1].float(), ids[0, half:])))
        held = cache.nbytes / ids.shape[1]
    return math.exp(sum(nats) / len(nats)), held


def continuation(model: Any, tokenizer: Any, count: int) -> str:
    ids = tools.encode(tokenizer, BEGINNING, model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=KVCache(model),
        max_new_tokens=count,
        do_sample=False,
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = tools.arguments_of(__doc__ or "")
    parser.add_argument("--keep", type=float, default=0.75, help="share of the cached bytes to keep (default: 0.75)")
    parser.add_argument("--windows", type=int, default=4, help="windows of calibration (default: 4)")
    parser.add_argument("--window-tokens", type=int, default=512, help="tokens of each (default: 512)")
    parser.add_argument("--held-out", type=int, default=3, help="windows of the perplexity (default: 3)")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--save", metavar="FOLDER", help="write the converted model there")
    args = parser.parse_args(arguments)
    if not 0 < args.keep <= 1:
        parser.error(f"--keep is a share, above 0 and at most 1, got {args.keep}")
    model, tokenizer, label = tools.load(args)

    def windows(name: str, count: int) -> list[torch.Tensor]:
        starts = range(tools.SKIPPED_CHARACTERS, tools.SKIPPED_CHARACTERS + 30_000 * count, 30_000)
        return [tools.text_ids(tokenizer, args.window_tokens, name, start).to(model.device) for start in starts]

    held_out = windows("topics", args.held_out)
    results: dict[str, Any] = {}
    with tools.progress(4) as advance:
        advance(0, "the model as it is")
        results["as it came"] = (*perplexity(model, held_out), continuation(model, tokenizer, args.max_new_tokens))
        advance(1, "conversion")
        began = time.perf_counter()
        model, report = convert_to_mla(model, kv_keep=args.keep, calibration=windows("docstrings", args.windows))
        enable_absorb(model)
        seconds = time.perf_counter() - began
        advance(1, "the converted model")
        text = continuation(model, tokenizer, args.max_new_tokens)
        results["converted"] = (*perplexity(model, held_out), text)
        advance(1, "the converted model, latents packed")
        results["converted, codec latent-4"] = (*perplexity(model, held_out, "latent-4"), "")
        advance(1)
    first, last = report.layers[0], report.layers[-1]
    print(f"{label}: converted in {seconds:.0f} s, {report.kept:.1%} of the cached bytes of a token")
    for name, layer in (("first", first), ("last", last)):
        print(f"  {name} layer: latent of {layer.kv_lora_rank}, rotary key of {layer.qk_rope_head_dim}")
    print()
    full = results["as it came"][1]
    rows = [[name, f"{value:.2f}", f"{held:,.0f}", f"{held / full:.2f}"] for name, (value, held, _) in results.items()]
    tools.show(["model", "perplexity", "bytes a token held", "share"], rows)
    print(f"\n{BEGINNING} ...")
    for name, (_, _, words) in results.items():
        if words:
            print(f"  {name:<12} {tools.shorten(words)!r}")
    if args.save:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
        print(f"\nsaved to {args.save}; AutoModelForCausalLM reads it once hf_kvcache is imported")
    return results | {"report": report}


if __name__ == "__main__":
    main()
