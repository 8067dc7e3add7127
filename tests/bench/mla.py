"""Attention layer of a model with latent attention (MLA): transformers' own cache, and the latents absorbed.

One attention module with random weights decodes token after token over a context that was put into its cache. Stock is
`DynamicCache`, which expands the whole context to all heads; the others are this library's caches on a twin with the
same weights and `enable_absorb`. All ways of one row are timed in turn, so that whatever else the machine does falls on
all of them alike. Medians in milliseconds (or another quantile: a busy machine interrupts long calls more often than
short ones); `x` is the time of stock divided by that of the way. `attention` begins where the cache is written and ends
before the output projection, `layer` is the whole module with its projections.

    python tests/bench/mla.py --threads 1
    python tests/bench/mla.py --crossover      # which side of a longer step is faster, and which the library takes
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from common import table, write_json
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from hf_kvcache import KVCache, enable_absorb
from hf_kvcache.mla import attention as mla_attention


def build(args: argparse.Namespace, dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=args.hidden, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=args.heads, num_key_value_heads=args.heads, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=args.rank, q_lora_rank=None,
        qk_nope_head_dim=args.nope, qk_rope_head_dim=args.rope, v_head_dim=args.value, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).to(dtype).eval()


class Step:
    """One module, one cache, one step of `new` tokens."""

    def __init__(self, model: Any, cache: Any, args: argparse.Namespace, tokens: int, new: int, dtype: torch.dtype):
        self.module = model.model.layers[0].self_attn
        self.cache, self.new = cache, new
        generator = torch.Generator().manual_seed(1)
        latent = torch.randn(1, 1, tokens, args.rank, generator=generator).to(dtype)
        rope = torch.randn(1, 1, tokens, args.rope, generator=generator).to(dtype)
        cache.update(latent, rope, 0)
        if isinstance(cache, KVCache):
            cache.kv_layers[0].settle()
        self.hidden = torch.randn(1, new, args.hidden, generator=generator).to(dtype)
        self.positions = model.model.rotary_emb(self.hidden, torch.arange(tokens, tokens + new)[None])
        mask = torch.ones(1, 1, new, tokens + new, dtype=torch.bool).tril(tokens)
        self.mask = None if new == 1 else mask
        self.began = 0.0
        update = cache.update

        def timed(*arguments: Any, **kwargs: Any) -> Any:
            self.began = time.perf_counter()
            return update(*arguments, **kwargs)

        cache.update = timed  # the attention proper begins here
        self.module.o_proj.register_forward_pre_hook(self._note)
        self.ended = 0.0

    def _note(self, *_: Any) -> None:
        self.ended = time.perf_counter()

    def __call__(self) -> tuple[torch.Tensor, float, float]:
        """Output, and milliseconds of attention and of the module."""
        began = time.perf_counter()
        output = self.module(self.hidden, self.positions, self.mask, self.cache)[0]
        whole = time.perf_counter() - began
        attention = self.ended - self.began
        self.cache.crop(-self.new)
        return output, 1000 * attention, 1000 * whole


def interleaved(steps: dict[str, Step], repeats: int, quantile: float) -> dict[str, tuple[float, float]]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(step()[1:])

    def middle(values: list[float]) -> float:
        return sorted(values)[int(quantile * (len(values) - 1))]

    return {name: (middle([a for a, _ in all_]), middle([w for _, w in all_])) for name, all_ in times.items()}


@torch.no_grad()
def decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in args.dtypes:
        dtype = getattr(torch, name)
        stock = build(args, dtype)
        twin = enable_absorb(copy.deepcopy(stock))
        for tokens in args.tokens:
            steps = {"stock": Step(copy.deepcopy(stock), DynamicCache(config=stock.config), args, tokens, 1, dtype)}
            for label, codec in [("absorbed", None), *((codec, codec) for codec in args.codecs)]:
                model = copy.deepcopy(twin)
                steps[label] = Step(model, KVCache(model, codec=codec), args, tokens, 1, dtype)
            exact = steps["stock"]()[0]
            times = interleaved(steps, args.repeats, args.quantile)
            for label, step in steps.items():
                attention, layer = times[label]
                cache = step.cache
                held = cache.nbytes if isinstance(cache, KVCache) else tokens * (args.rank + args.rope) * dtype.itemsize
                rows.append(
                    {
                        "dtype": name, "tokens": tokens, "way": label, "attention": attention,
                        "x": round(times["stock"][0] / attention, 1), "layer": layer,
                        "layer x": round(times["stock"][1] / layer, 1),
                        "bytes": round(held / (tokens * (args.rank + args.rope) * dtype.itemsize), 3),
                        "error": float((step()[0] - exact).float().norm() / exact.float().norm()),
                    }
                )  # fmt: skip
    return rows


@torch.no_grad()
def crossover(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    chosen = mla_attention.is_cheaper
    for name in args.dtypes:
        dtype = getattr(torch, name)
        stock = build(args, dtype)
        twin = enable_absorb(copy.deepcopy(stock))
        for tokens in args.tokens:
            for new in args.new:
                times = {}
                for label, side in (("expanded", False), ("absorbed", True)):
                    mla_attention.is_cheaper = lambda *_, side=side: side
                    model = copy.deepcopy(twin)
                    step = Step(model, KVCache(model), args, tokens, new, dtype)
                    times[label] = interleaved({label: step}, args.repeats, args.quantile)[label][0]
                mla_attention.is_cheaper = chosen
                module = twin.model.layers[0].self_attn
                takes = "absorbed" if chosen(new, tokens + new, module) else "expanded"
                rows.append({"dtype": name, "tokens": tokens, "new": new} | times | {"takes": takes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--codecs", nargs="*", default=["latent-4"])
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--new", type=int, nargs="+", default=[16, 64, 128, 192, 384])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    parser.add_argument("--nope", type=int, default=128)
    parser.add_argument("--value", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = crossover(args) if args.crossover else decode(args)
    print(table(rows))
    write_json(args.json, {"arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
