"""Layers that share keys and values: what it costs in perplexity, by how the layers were found, and what it saves.

    python tests/bench/cross_layer.py quality
    python tests/bench/cross_layer.py speed --threads 1

`quality`: layers are found on docstrings of the standard library, perplexity is that of windows of `pydoc`'s topics,
teacher-forced in one pass. A search is run once, for the largest share; its first pairs are those of the smaller ones.
`speed`: decoding and prompts with a `DynamicCache`, a `KVCache`, a `CrossLayerSharedCache(sharing=2)`, and the same on
a model whose followers skip their projections (`patches/cross_layer.py`); all interleaved, medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from common import TEXTS, attach, forward, full_nbytes, load_model, table, topics_text, track, window_ids, write_json
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvcache import CrossLayerSharedCache, KVCache, find_sharing
from patches.cross_layer import apply

SHARES = (0.1, 0.2, 0.3)


@torch.no_grad()
def measure(model: Any, windows: list[torch.Tensor], sharing: Any, wanted: list[torch.Tensor] | None) -> dict[str, Any]:
    """Perplexity and divergence from the unshared model's predictions over whole windows."""
    loss = kl = 0.0
    same = 0.0
    log_probs = []
    for index, ids in enumerate(windows):
        cache = KVCache(model.config, sharing=sharing)
        got = model(ids, past_key_values=cache).logits[0].float().log_softmax(-1)
        log_probs.append(got)
        loss -= float(got[:-1].gather(-1, ids[0, 1:, None]).mean()) / len(windows)
        if wanted is not None:
            divergence = torch.nn.functional.kl_div(got, wanted[index], reduction="none", log_target=True)
            kl += float(divergence.sum(-1).mean()) / len(windows)
            same += float((got.argmax(-1) == wanted[index].argmax(-1)).float().mean()) / len(windows)
    result: dict[str, Any] = {"perplexity": float(torch.tensor(loss).exp()), "KL": kl, "top-1": same}
    if wanted is None:
        result["log_probs"] = log_probs
    return result


def adjacent(layers: int, count: int, where: str) -> dict[int, int]:
    """`count` pairs (2i, 2i + 1): the last ones, or spread evenly ("spread")."""
    pairs = layers // 2
    chosen = (
        range(pairs - count, pairs) if where == "last" else [(2 * i + 1) * pairs // (2 * count) for i in range(count)]
    )
    return {2 * i + 1: 2 * i for i in chosen}


def quality(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer, label = load_model(args.model)
    layers = model.config.num_hidden_layers
    text = topics_text()
    windows = [window_ids(tokenizer, text, 5000 + 30000 * w, args.tokens) for w in range(args.windows)]
    calibration = TEXTS["docstrings"]()
    texts = [window_ids(tokenizer, calibration, 5000 + 40000 * w, args.calibration_tokens) for w in range(args.texts)]
    full = measure(model, windows, None, None)
    wanted = full.pop("log_probs")
    rows: list[dict[str, Any]] = [
        {"share": 0.0, "map": "none", "perplexity": full["perplexity"], "KL": 0.0, "top-1": 1.0}
    ]
    maps: dict[str, Any] = {}
    most = round(max(SHARES) * layers)
    for name in args.maps:
        began = time.perf_counter()
        found = None
        if not name.startswith("adjacent"):
            method = {"KVSharer": "kvsharer", "search by KL": "kl"}[name]
            found = find_sharing(model, texts, most, method, tokens=args.calibration_tokens, sources=args.sources)
        seconds = time.perf_counter() - began
        for share in SHARES:
            count = round(share * layers)
            if found is None:
                sharing = adjacent(layers, count, name.partition(", ")[2])
            else:
                sharing = dict(list(found.map.items())[:count])
            row = {"share": share, "map": name} | measure(model, windows, sharing, wanted)
            if found is not None and count == most:
                row |= {"cosine": found.cosine, "calibration KL": found.kl}
                row |= {"tried": len(found.tried), "seconds": seconds}
            rows.append(row)
            maps[f"{share} {name}"] = sharing
            print(row, sharing, flush=True)
    rows.append({"share": 0.5, "map": "sharing=2"} | measure(model, windows, 2, wanted))
    columns = ["share", "map", "perplexity", "KL", "top-1", "cosine", "calibration KL", "tried", "seconds"]
    rows = [{name: row.get(name, "") for name in columns} for row in rows]
    print(f"{label}: {args.windows} windows of {args.tokens} tokens; {args.texts} texts of {args.calibration_tokens}")
    print(table(rows))
    return {"model": label, "rows": rows, "maps": {name: list(value.items()) for name, value in maps.items()}}


@torch.no_grad()
def timed(model: Any, cache: Any, ids: torch.Tensor) -> float:
    """Milliseconds of one pass over `ids`."""
    began = time.perf_counter()
    forward(model, ids, cache)
    return 1000 * (time.perf_counter() - began)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    models = {}
    if "demo" in args.models:
        model, _, label = load_model(args.model, dtype)
        models[label] = model
    if "mha" in args.models:
        torch.manual_seed(0)
        wide = LlamaConfig(
            vocab_size=1000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12
        )
        models["a random Llama, 12 layers, 12 query and 12 KV heads of 64"] = LlamaForCausalLM(wide).eval().to(dtype)
    results = {}
    for label, model in models.items():
        attach(model)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 900, (1, args.prompt), generator=generator)

        patched = copy.deepcopy(model)
        apply(patched, 2)

        def make(model: Any = model, patched: Any = patched) -> dict[str, tuple[Any, Any]]:
            return {
                "DynamicCache": (model, DynamicCache(config=model.config)),
                "KVCache": (model, KVCache(model)),
                "sharing=2": (model, CrossLayerSharedCache(model)),
                "sharing=2, patched": (patched, CrossLayerSharedCache(patched)),
            }

        times: dict[str, dict[str, list[float]]] = {name: {"prompt": [], "step": []} for name in make()}
        for _ in track(range(args.rounds), "prompts"):
            caches = make()
            for name, (used, cache) in caches.items():
                times[name]["prompt"].append(timed(used, cache, ids))
        for _ in track(range(args.steps), "steps"):
            for name, (used, cache) in caches.items():
                times[name]["step"].append(timed(used, cache, ids[:, :1]))
        rows = []
        for name, (_, cache) in caches.items():
            row: dict[str, Any] = {"cache": name}
            for part, kind in (("prompt", "ms a prompt"), ("step", "ms a token")):
                row[kind] = statistics.median(times[name][part])
                ratios = [a / b for a, b in zip(times[name][part], times["sharing=2"][part], strict=True)]
                row[f"{part} / sharing=2"] = statistics.median(ratios)
            row["bytes"] = full_nbytes(cache) / full_nbytes(caches["KVCache"][1])
            rows.append(row)
        print(f"{label}, {args.dtype}, a prompt of {args.prompt} tokens, {torch.get_num_threads()} thread(s)")
        print(table(rows))
        results[label] = rows
    return {"rows": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["quality", "speed"])
    parser.add_argument("--model", help="a Hub id or folder; the demo model if not given")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a window that perplexity is measured on")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--calibration-tokens", type=int, default=256)
    parser.add_argument("--sources", type=int, default=3, help="of the search by KL")
    parser.add_argument("--maps", nargs="+", default=["KVSharer", "adjacent, last", "adjacent, spread", "search by KL"])
    parser.add_argument("--models", nargs="+", default=["demo", "mha"], choices=["demo", "mha"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    write_json(args.json, quality(args) if args.part == "quality" else speed(args))


if __name__ == "__main__":
    main()
