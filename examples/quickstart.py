"""One long document under each cache: what is kept, what it costs, and what is lost.

    python examples/quickstart.py --context-tokens 4000 --budget 0.125

Every cache reads the same document twice. Once it is followed by the document's own next tokens, fed one at a time,
and each next-token distribution is compared with the full cache's. Once it is followed by a question about a sentence
planted in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from demo_model import ChecksumError, ModelUnavailable, load
from hf_kvcache import HeavyHitterCache, KVCache, QuantizedKIVICache, SlidingWindowCache, SnapKVCache, detach

CODE = "48213"
QUESTION = "\n\nThe secret pass code of Oslo is"
NEEDLE = f"\n\nThe secret pass code of Oslo is {CODE}.\n\n"
DEPTH = 0.4
FOLLOWING_TOKENS = 32
SKIPPED_CHARACTERS = 5_000  # the first topics are grammar tables

# One row of the table each: a name, and how to make the cache from the model and the number of tokens it may keep.
TECHNIQUES: dict[str, Callable[[Any, int], Any]] = {
    "full cache (transformers)": lambda model, budget: DynamicCache(config=model.config),
    "KVCache (identity)": lambda model, budget: KVCache(model),
    "QuantizedKIVICache, 4 bits": lambda model, budget: QuantizedKIVICache(model, nbits=4),
    "KVCache, codec rotated-3-2": lambda model, budget: KVCache(model, codec="rotated-3-2"),
    "SlidingWindowCache": lambda model, budget: SlidingWindowCache(model, window_length=budget - 4, num_sink_tokens=4),
    "SnapKVCache": lambda model, budget: SnapKVCache(
        model,
        max_capacity_prompt=budget,
        pooling="ahead",
        kernel_size=7,
        window_size=16,
        wide_window=128,
        recent_ratio=0.25,
    ),
    "HeavyHitterCache": lambda model, budget: HeavyHitterCache(
        model, heavy_size=budget // 2, recent_size=budget - budget // 2, score="mean"
    ),
}


@dataclass
class Row:
    """What one cache did."""

    technique: str
    kept_tokens: int
    seen_tokens: int
    nbytes: int
    tokens_per_second: float
    fastest_step_seconds: float
    kl_nats: float
    top1_agreement: float
    needle_found: bool
    answer: str


def main() -> None:
    """Measure every technique and print the table."""
    args = parse_args()
    # 5.24 prefers `cache=`; `past_key_values=` is the name that every supported version takes.
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    console = Console()
    try:
        model, tokenizer, label = load(args.model, args.dtype)
    except (ModelUnavailable, ChecksumError) as error:
        raise SystemExit(str(error)) from None
    model.to(args.device)
    document, following, question = make_prompts(tokenizer, args.context_tokens, args.device)
    budget = max(round(args.budget * document.shape[-1]), 64)
    steps = 2 + FOLLOWING_TOKENS + args.max_new_tokens

    rows: list[Row] = []
    refused: dict[str, str] = {}
    reference: torch.Tensor | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=steps * len(TECHNIQUES))

        def advance() -> None:
            progress.advance(task)

        for position, (name, make) in enumerate(TECHNIQUES.items()):
            progress.update(task, description=name)
            try:
                with attached_only_here(model):
                    cache = make(model, budget)
                    log_probs, seconds = follow(model, cache, document, following, advance)
                    kept, held = kept_tokens(cache), held_bytes(cache)
                    seen = int(cache.get_seq_length())
                    reference = log_probs if reference is None else reference
                    kl, top1 = compare(reference, log_probs)
                    text = answer(model, tokenizer, make(model, budget), question, args.max_new_tokens, advance)
            except (NotImplementedError, ValueError) as error:  # not every technique fits every model
                if position == 0:
                    raise
                refused[name] = str(error)
            else:
                speed = 1 / statistics.median(seconds)
                rows.append(Row(name, kept, seen, held, speed, min(seconds), kl, top1, CODE in text, text))
            progress.update(task, completed=(position + 1) * steps)

    settings = {
        "model": label,
        "dtype": str(args.dtype).removeprefix("torch."),
        "device": args.device,
        "context_tokens": document.shape[-1],
        "budget_tokens": budget,
        "following_tokens": FOLLOWING_TOKENS,
    }
    show(console, settings, rows, refused)
    if args.json is not None:
        args.json.write_text(
            json.dumps({**settings, "rows": [asdict(row) for row in rows], "refused": refused}, indent=2)
        )


def parse_args() -> argparse.Namespace:
    """Command line; every option has a default that suits two CPU cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--context-tokens", type=int, default=2000, help="length of the document (default: 2000)")
    parser.add_argument("--budget", type=float, default=0.25, help="fraction of the tokens to keep (default: 0.25)")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="length of each answer (default: 16)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on CPU, else bfloat16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if not 0 < args.budget <= 1:
        parser.error(f"--budget is a fraction in (0, 1], got {args.budget}")
    if args.context_tokens < 200:
        parser.error(f"--context-tokens must be at least 200, got {args.context_tokens}")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    # float32 on CPU: stock attention over grouped heads is several times slower there in bfloat16.
    name = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if name not in dtypes:
        parser.error(f"--dtype must be one of {', '.join(dtypes)}, got {name}")
    args.dtype = dtypes[name]
    return args


def make_prompts(tokenizer: Any, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the document with the needle in it, the tokens that follow, and the document with the question; [1, T]."""
    text = "\n\n".join(topics[key] for key in sorted(topics))
    # No tokenizer packs more than some ten characters of English into a token, and tokenizing less is faster.
    text = text[SKIPPED_CHARACTERS : SKIPPED_CHARACTERS + 10 * (length + FOLLOWING_TOKENS)]

    def ids_of(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    ids, needle = ids_of(text), ids_of(NEEDLE)
    body = length - len(needle)
    if len(ids) < body + FOLLOWING_TOKENS:
        raise SystemExit(f"--context-tokens can be at most {len(ids) + len(needle) - FOLLOWING_TOKENS} with this model")
    depth = int(DEPTH * body)
    document = ids[:depth] + needle + ids[depth:body]
    if tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id:
        document = [tokenizer.bos_token_id, *document]
    following = ids[body : body + FOLLOWING_TOKENS]
    return tuple(torch.tensor([part], device=device) for part in (document, following, document + ids_of(QUESTION)))  # type: ignore[return-value]


@contextmanager
def attached_only_here(model: Any) -> Iterator[None]:
    """Making a cache from a model switches its attention over; the next technique starts from the stock model again."""
    try:
        yield
    finally:
        detach(model)


@torch.inference_mode()
def follow(
    model: Any, cache: Any, prompt: torch.Tensor, following: torch.Tensor, advance: Callable[[], None]
) -> tuple[torch.Tensor, list[float]]:
    """Read the prompt in one call, then token by token: log-probabilities [T, V], and the seconds of each step."""
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    advance()
    log_probs, seconds = [], []
    for token in following.split(1, dim=-1):
        start = time.perf_counter()
        logits = model(token, past_key_values=cache, use_cache=True).logits[0, -1]
        log_probs.append(logits.float().log_softmax(-1).cpu())  # .cpu() waits for the device, so the time is honest
        seconds.append(time.perf_counter() - start)
        advance()
    return torch.stack(log_probs), seconds


def compare(reference: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean KL divergence in nats of the other log-probabilities [T, V] from the reference, and top-token agreement."""
    kl = (reference.exp() * (reference - other)).sum(-1).mean().item()
    top1 = (reference.argmax(-1) == other.argmax(-1)).float().mean().item()
    return max(kl, 0.0), top1


class _Ticker(BaseStreamer):
    """Advances the progress bar at each generated token."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance

    def put(self, value: torch.Tensor) -> None:
        self._advance()

    def end(self) -> None:
        pass


def answer(
    model: Any, tokenizer: Any, cache: Any, question: torch.Tensor, max_new_tokens: int, advance: Callable[[], None]
) -> str:
    """Generate greedily after the question. The one line a user changes is `past_key_values=cache`."""
    output = model.generate(
        input_ids=question,
        attention_mask=torch.ones_like(question),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        streamer=_Ticker(advance),
    )
    return tokenizer.decode(output[0, question.shape[-1] :], skip_special_tokens=True)


def kept_tokens(cache: Any) -> int:
    """Rows physically held by the layer that holds most."""
    if isinstance(cache, KVCache):
        return max(cache.kept_length(layer) for layer in range(len(cache.layers)))
    return int(cache.get_seq_length())


def held_bytes(cache: Any) -> int:
    """Bytes of keys and values that the cache holds."""
    if isinstance(cache, KVCache):
        return int(cache.nbytes)
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))


def show(console: Console, settings: dict[str, Any], rows: list[Row], refused: dict[str, str]) -> None:
    """Print the table, then what each cache answered."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{settings['model']}, {settings['dtype']}, {settings['context_tokens']} tokens of context, "
        f"budget {settings['budget_tokens']} tokens",
    )
    # The table fits 80 columns: only the first column may wrap, and only as far as the longest class name.
    table.add_column("technique", min_width=max(len(name) for name in TECHNIQUES if " " not in name))
    for heading in ("kept/seen", "held", "ratio", "tokens/s", "KL", "top-1", "needle"):
        table.add_column(heading, justify="right", no_wrap=True)
    full = rows[0].nbytes
    for row in rows:
        table.add_row(
            row.technique,
            f"{row.kept_tokens}/{row.seen_tokens}",
            f"{row.nbytes / 2**20:.1f} MiB",
            f"{row.nbytes / full:.0%}",
            f"{row.tokens_per_second:.1f}",
            f"{row.kl_nats:.4f}",
            f"{row.top1_agreement:.0%}",
            "found" if row.needle_found else "lost",
        )
    console.print(table)
    console.print(
        f"ratio, KL (nats) and top-1 are against the full cache, KL and top-1 over the {settings['following_tokens']} "
        "tokens that follow the document; tokens/s is the median decoding step.\n"
    )
    if any(row.tokens_per_second * row.fastest_step_seconds < 0.5 for row in rows):
        console.print(
            "[yellow]Step times varied by more than 2x: the machine is busy, so do not compare tokens/s.[/]\n"
        )
    console.print(f"[bold]{escape(QUESTION.strip())}[/bold] ...")
    for row in rows:
        console.print(f"  {row.technique:<27} {escape(repr(row.answer))}", highlight=False, soft_wrap=True)
    for name, reason in refused.items():
        console.print(f"  {name:<27} refused: {escape(reason)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
