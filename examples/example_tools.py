"""What the examples share: the model and its arguments, a tiny stand-in for tests, texts, progress, tables, caches."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StoppingCriteria, logging

from hf_kvcache import (
    CPUOffloadedCache,
    CrossLayerSharedCache,
    HeavyHitterCache,
    KVCache,
    QuantizedKIVICache,
    SlidingWindowCache,
    SnapKVCache,
)
from hf_kvcache.evaluate.texts import TEXTS

SKIPPED_CHARACTERS = 5_000  # the first topics are grammar tables

# Every cache of the library in one setting each: from the model and the number of tokens that it may keep.
CACHES: dict[str, Callable[[Any, int], Any]] = {
    "DynamicCache (transformers)": lambda model, budget: DynamicCache(config=model.config),
    "KVCache": lambda model, budget: KVCache(model),
    "SlidingWindowCache": lambda model, budget: SlidingWindowCache(model, window_length=budget - 4),
    "SnapKVCache": lambda model, budget: SnapKVCache(
        model,
        max_capacity_prompt=budget,
        pooling="ahead",
        kernel_size=7,
        window_size=16,
        wide_window=min(128, budget),
        recent_ratio=0.25,
    ),
    "HeavyHitterCache": lambda model, budget: HeavyHitterCache(
        model, heavy_size=budget // 2, recent_size=budget - budget // 2, score="mean"
    ),
    "QuantizedKIVICache, 4 bits": lambda model, budget: QuantizedKIVICache(model, nbits=4, residual_length=32),
    "KVCache, rotated-4": lambda model, budget: KVCache(model, codec="rotated-4"),
    "SnapKVCache, rotated-4": lambda model, budget: SnapKVCache(
        model, max_capacity_prompt=2 * budget, window_size=16, pooling="maxpool", kernel_size=13, codec="rotated-4"
    ),
    "CPUOffloadedCache": lambda model, budget: CPUOffloadedCache(model, resident_length=max(16, budget // 2)),
    "CrossLayerSharedCache, pairs": lambda model, budget: CrossLayerSharedCache(model, 2),
}


def arguments_of(description: str) -> argparse.ArgumentParser:
    """A parser with what every example takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tiny", action="store_true", help="a model of random weights, to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def load(args: argparse.Namespace) -> tuple[Any, Any, str]:
    """Model, tokenizer and what the model is called."""
    be_quiet()
    if args.tiny:
        model, tokenizer = tiny()
        label = "a tiny model of random weights"
    else:
        import demo_model

        try:
            model, tokenizer, label = demo_model.load(args.model, torch.float32)
        except (demo_model.ModelUnavailable, demo_model.ChecksumError) as error:
            raise SystemExit(str(error)) from None
    # A pad token of its own, so that `generate` does not say which one it takes instead.
    config = model.generation_config
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = 0 if end is None else end if isinstance(end, int) else end[0]
    return model.to(args.device), tokenizer, label


def be_quiet() -> None:
    """No messages about upstream matters between the lines of a table."""
    # 5.24 prefers `cache=`; `past_key_values=` is the name that every supported version takes.
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    logging.set_verbosity_error()


def tiny(layers: int = 4) -> tuple[Any, Any]:
    """A small random Llama and a tokenizer of bytes. Its weights are wide, so that wrong attention changes tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=256,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model, ByteTokenizer()


class ByteTokenizer:
    """As much of a tokenizer as the examples need: a token for each byte."""

    pad_token_id, bos_token_id, eos_token_id = 0, None, None
    chat_template = None

    def __call__(self, text: str, return_tensors: str | None = None, **_: Any) -> SimpleNamespace:
        ids = list(text.encode())
        return SimpleNamespace(input_ids=torch.tensor([ids]) if return_tensors else ids)

    def decode(self, ids: Any, **_: Any) -> str:
        values = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        return bytes(value for value in values if value < 256).decode(errors="replace")


def encode(tokenizer: Any, text: str, device: Any = "cpu") -> torch.Tensor:
    """Ids `[1, T]` of the text alone."""
    return torch.tensor([list(tokenizer(text, add_special_tokens=False).input_ids)], device=device)


def text_ids(tokenizer: Any, tokens: int, name: str = "topics", start: int = SKIPPED_CHARACTERS) -> torch.Tensor:
    """`[1, tokens]` ids of a text that every Python has: `"topics"` of pydoc or `"docstrings"`."""
    # No tokenizer packs more than some twelve characters of English into a token.
    ids = encode(tokenizer, TEXTS[name]()[start : start + 12 * tokens])[:, :tokens]
    if ids.shape[1] < tokens:
        raise SystemExit(f"the text has only {ids.shape[1]} tokens from character {start} on, {tokens} are needed")
    return ids


def choose(names: Sequence[str] | None) -> dict[str, Callable[[Any, int], Any]]:
    """The caches of these names, or whose names begin so, the stock cache first; all of them without any."""
    if not names:
        return CACHES
    stock = next(iter(CACHES))

    def is_meant(key: str) -> bool:
        return any(key == name or (name not in CACHES and key.startswith(name)) for name in names)

    chosen = {key: make for key, make in CACHES.items() if key == stock or is_meant(key)}
    for name in names:
        if not any(key.startswith(name) for key in CACHES):
            raise SystemExit(f"unknown cache {name!r}. There are: {', '.join(CACHES)}")
    return chosen


@contextmanager
def progress(total: int, description: str = "") -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, where stderr is a terminal; gives `advance(count=1, description=None)`."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda count=1, description=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(description, total=total)

        def advance(count: int = 1, description: str | None = None) -> None:
            bar.update(task, advance=count, description=description)

        yield advance


class Ticker(StoppingCriteria):
    """Advances a progress bar at each step of `generate`, beams included, and stops nothing."""

    def __init__(self, advance: Callable[..., None]) -> None:
        self.advance = advance

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.advance()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def show(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for number, row in enumerate(cells):
        first, *others = row
        line = first.ljust(widths[0]) + "".join(f"  {c:>{w}}" for c, w in zip(others, widths[1:], strict=True))
        print(line.rstrip())
        if number == 0:
            print("-" * (sum(widths) + 2 * len(others)))


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f} MB"


def shorten(text: str, width: int = 60) -> str:
    """One line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."
