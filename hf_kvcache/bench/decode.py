"""Time of a decoding step by cache and context.

A prompt goes through each cache in pieces; then one token after the other is fed to every cache in turn, so that
whatever else the machine does falls on all of them alike. Medians of the steps, and ratios to the `DynamicCache`.
"""

from __future__ import annotations

import inspect
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from ..attention import attach
from ..cache import KVCache, _native_nbytes
from ..evaluate.measure import cache_argument
from ..specs import parse_spec

STOCK = "DynamicCache"
WARM_UP = 2  # steps that are not counted: buffers grow and kernels are chosen in them


def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits after the last of `ids` `[B, n]`, which go through the cache."""
    arguments: dict[str, Any] = {cache_argument(model): cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    return model(ids, use_cache=True, **arguments).logits


@torch.no_grad()
def prefill(model: Any, cache: Any, ids: torch.Tensor, chunk: int) -> None:
    """Feed `ids` in pieces of `chunk` tokens."""
    for start in range(0, ids.shape[1], chunk):
        forward(model, ids[:, start : start + chunk], cache)


@torch.no_grad()
def step(model: Any, cache: Any, token: torch.Tensor) -> float:
    """Milliseconds of one decoding step."""
    on_gpu = token.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(token.device)
    began = time.perf_counter()
    forward(model, token, cache)
    if on_gpu:
        torch.cuda.synchronize(token.device)
    return 1000 * (time.perf_counter() - began)


def held_bytes(cache: Any) -> int:
    """Bytes of all storage that a cache holds, of this library or of transformers."""
    return cache.nbytes if isinstance(cache, KVCache) else sum(_native_nbytes(layer) for layer in cache.layers)


def summary(times: Mapping[str, Sequence[float]], held: Mapping[str, int]) -> list[dict[str, Any]]:
    """A row for each cache: median and fastest milliseconds, and ratios to the `DynamicCache` (if it is there)."""
    median = {name: statistics.median(values[WARM_UP:] or values) for name, values in times.items() if values}
    rows = []
    for name in median:
        row: dict[str, Any] = {"cache": name, "ms": median[name], "fastest ms": min(times[name])}
        if STOCK in median:
            row |= {"times faster": median[STOCK] / median[name], "bytes": held[name] / max(1, held[STOCK])}
        rows.append(row)
    return rows


def decode_times(
    model: Any,
    ids: torch.Tensor,
    contexts: Sequence[int],
    specs: Sequence[str],
    *,
    steps: int = 20,
    chunk: int = 2048,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Time decoding at each context with a `DynamicCache` and with the caches that `specs` name.

    Args:
        model: the model; it is attached.
        ids: `[1, n]` tokens of a text, at least as many as the longest context.
        contexts: tokens that were read before the steps that are timed.
        specs: caches, see `hf_kvcache.specs`; shares are shares of the context.
        steps: steps that count, after two that do not.
        chunk: tokens of a prompt that are read at once.
        progress: called as `(done, of all, what comes next)`.

    Returns:
        A dict ready for JSON: `contexts` has `tokens`, `rows` (see `summary`) and `times` of each. After Ctrl-C it has
        what was measured until then, and `interrupted`.

    Raises `ValueError` for texts that are too short and for bad specs, before anything is run.
    """
    for name, value in (("steps", steps), ("chunk", chunk), *(("context", n) for n in contexts)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    parsed = {spec: parse_spec(spec) for spec in specs}
    for spec in parsed.values():
        for tokens in contexts:
            spec.check(tokens)
    if ids.shape[1] < max(contexts):
        raise ValueError(
            f"the text has {ids.shape[1]:,} tokens and the longest context is {max(contexts):,}: give a longer text or "
            "a shorter --contexts"
        )
    for spec in parsed.values():
        spec.build(model, max(contexts))  # refusals come before the first prompt
    attach(model)
    ids = ids.to(model.device)
    total = len(contexts) * (len(parsed) + 1 + steps + WARM_UP)
    done = 0
    found: list[dict[str, Any]] = []
    interrupted = False
    try:
        for tokens in contexts:
            caches: dict[str, Any] = {STOCK: DynamicCache(config=model.config)}
            caches |= {name: spec.build(model, tokens) for name, spec in parsed.items()}
            for name, cache in caches.items():
                progress(done, total, f"{tokens:,} tokens: {name} reads")
                prefill(model, cache, ids[:, :tokens], chunk)
                done += 1
            times: dict[str, list[float]] = {name: [] for name in caches}
            found.append({"tokens": tokens, "rows": [], "times": times})
            for _ in range(steps + WARM_UP):
                progress(done, total, f"{tokens:,} tokens: steps")
                for name, cache in caches.items():
                    times[name].append(step(model, cache, ids[:, :1]))
                done += 1
            found[-1]["rows"] = summary(times, {name: held_bytes(cache) for name, cache in caches.items()})
    except KeyboardInterrupt:
        interrupted = True
        found = [entry for entry in found if entry["rows"]]
        if not found:
            raise
    progress(total, total, "done")
    result: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": getattr(model, "name_or_path", "") or type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "steps": steps,
        "contexts": found,
    }
    return result | ({"interrupted": True} if interrupted else {})
