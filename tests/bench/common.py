"""What the benchmarks share: the model, texts that every Python has, one prompt pass for many caches, output.

Nothing here is random: the same Python, model and arguments give the same figures.
"""

from __future__ import annotations

import ast
import inspect
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

import demo_model  # noqa: E402
from hf_kvcache import HeavyHitterCache, KVCache, SlidingWindowCache, SnapKVCache, attach  # noqa: E402
from hf_kvcache.attention import NAME, attention_forward  # noqa: E402
from hf_kvcache.codecs import PRESETS, preset  # noqa: E402
from hf_kvcache.evaluate.texts import TEXTS  # noqa: E402, F401 (for the scripts)
from hf_kvcache.evaluate.texts import topics as topics_text  # noqa: E402, F401

T = TypeVar("T")

# What `fidelity.py` and `recall.py` compare unless told otherwise; see `make_cache`.
CACHES = [
    "snapkv",
    "snapkv:pooling=maxpool,kernel_size=13,window_size=128",
    "snapkv:pooling=ahead,kernel_size=7,window_size=16,wide_window=128,recent_ratio=0.25",
    "snapkv:pooling=ahead,kernel_size=7,window_size=16,wide_window=128,recent_ratio=0.25,adaptive_heads=True",
    "h2o",
    "h2o:score=mean",
    "window",
]


def load_model(name: str | None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, str]:
    """The model (attached, so that every cache works), its tokenizer, and what it is called."""
    model, tokenizer, label = demo_model.load(name, dtype)
    attach(model)
    return model, tokenizer, label


def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits `[B, 1, vocabulary]` after the last of `ids`, which go through the cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, logits_to_keep=1, **{name: cache}).logits


# ---------------------------------------------------------------------- texts


def window_ids(tokenizer: Any, text: str, start: int, tokens: int) -> torch.Tensor:
    """`[1, tokens]` ids of the text from character `start` on."""
    ids = tokenizer(text[start : start + 12 * tokens], return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"the text has only {ids.shape[1]} tokens from character {start} on, {tokens} are needed")
    return ids


# ---------------------------------------------------------------------- one prompt pass for many caches


def _nothing(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2), None


AttentionInterface.register("bench_nothing", _nothing)


@torch.no_grad()
def read_prompt(model: Any, ids: torch.Tensor, caches: Iterable[Any]) -> tuple[torch.Tensor, DynamicCache]:
    """Last-token logits `[1, vocabulary]` and the full cache; `caches` have read the prompt too.

    The model runs once, over plain tensors. Each cache is handed every layer's queries, keys and values through its own
    `update` and this library's attention function, as in a pass of its own; only the attention output, which is the
    same for all (a prompt attends before anything is dropped), is not computed again.
    """
    caches = list(caches)

    def tee(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **kwargs: Any
    ) -> Any:
        config = module.config
        mine = config._attn_implementation
        for cache in caches:
            views = cache.update(key, value, module.layer_idx)
            attention_forward(module, query, *views, mask, before="bench_nothing", **kwargs)
        config._attn_implementation_internal = mine
        return attention_forward(module, query, key, value, mask, before="sdpa", **kwargs)

    AttentionInterface.register("bench_tee", tee)
    AttentionMaskInterface.register("bench_tee", sdpa_mask)
    full = DynamicCache(config=model.config)
    with _implementation(model, "bench_tee"):
        logits = forward(model, ids, full)[:, -1]
    return logits, full


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    model.config._attn_implementation_internal = name
    try:
        yield
    finally:
        model.config._attn_implementation_internal = NAME


def full_nbytes(cache: Any) -> int:
    """Bytes of a `DynamicCache`, or of one of this library's."""
    if isinstance(cache, KVCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def parse_cache(text: str) -> tuple[str, dict[str, Any]]:
    """`"snapkv:pooling=maxpool,window_size=16"` -> name and arguments."""
    name, _, rest = text.partition(":")
    arguments: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return name, arguments


def make_cache(model: Any, spec: str, rows: int) -> KVCache:
    """A cache of `rows` rows per KV head; `spec` names it: snapkv, h2o, window, identity, or a codec's preset.

    Arguments follow a colon, as `name=value,...`. `h2o` keeps half of its rows for recent tokens,
    `window` four for sinks, unless told otherwise.
    """
    name, arguments = parse_cache(spec)
    if name == "identity":
        return KVCache(model, **arguments)
    if name == "snapkv":
        return SnapKVCache(model, max_capacity_prompt=rows, **arguments)
    if name == "h2o":
        recent = int(rows * arguments.pop("recent_share", 0.5))
        return HeavyHitterCache(model, heavy_size=rows - recent, recent_size=recent, **arguments)
    if name == "window":
        sinks = arguments.pop("num_sink_tokens", 4)
        return SlidingWindowCache(model, window_length=rows - sinks, num_sink_tokens=sinks, **arguments)
    if name in PRESETS:
        return KVCache(model, codec=preset(name, **arguments))
    raise ValueError(f"unknown cache {name!r}: identity, snapkv, h2o, window or one of {', '.join(PRESETS)}")


# ---------------------------------------------------------------------- output


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar on stderr where rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track as rich_track
    except ImportError:
        return items
    return rich_track(items, description=description, total=total, console=Console(stderr=True), transient=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table; floats with four significant digits."""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    head = list(rows[0])
    lines = [head, ["---"] * len(head)] + [[cell(row[name]) for name in head] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """The result with the versions it was measured on, if a path was asked for (`-` is standard output)."""
    if path is None:
        return
    import transformers

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    text = json.dumps(result | {"versions": versions}, indent=1)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")
