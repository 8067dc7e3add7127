"""`hf-kvcache chat`: a conversation in the terminal, with what the cache holds beside it."""

from __future__ import annotations

import io
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import StoppingCriteria, TextStreamer

from ..evaluate.measure import cache_argument
from ..sizing.units import show_bytes
from ..specs import parse_spec
from .common import (
    INTERRUPTED,
    Attention,
    Device,
    GgufFile,
    ThreadCount,
    Wrong,
    check_paths,
    learned_positions,
    load,
    threads,
    write_json,
)

HELP = "/reset forgets the conversation, /quit (or end of input) ends it, Ctrl-C stops an answer"
_MARK = "\u2063reply\u2063"  # stands for an answer while the template is asked what follows one


def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id or a folder.", show_default=False)],
    cache: Annotated[
        str, typer.Option(metavar="SPEC", help="The cache, as snapkv:max_capacity_prompt=1024 or rotated-4.")
    ] = "kv",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the sampling.")] = 0,
    gguf_file: GgufFile = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the model: fp32, bf16 or fp16.")] = "fp32",
    attention: Attention = "sdpa",
    device: Device = "cpu",
    thread_count: ThreadCount = None,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write turns and bytes as JSON.", show_default=False)
    ] = None,
) -> int:
    """Chat in the terminal, and see what the cache holds.

    Kept and seen tokens and bytes are shown as they grow, in the last line of the terminal, or after each answer.

    \b
    Reads lines from the terminal or from a pipe:
      printf 'Hello\\nAnd now?\\n' | hf-kvcache chat MODEL --cache rotated-4

    /reset forgets the conversation, /quit (or end of input) ends it, Ctrl-C stops an answer.
    """
    if max_new_tokens < 1:
        raise Wrong(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if not 0 <= temperature < inf:
        raise Wrong(f"--temperature must be 0 or above, got {temperature:g}")
    spec = parse_spec(cache)
    spec.check()
    check_paths(json)
    threads(thread_count)
    loaded, tokenizer = load(model, dtype, attention, device, gguf_file)
    talk = Conversation(loaded, tokenizer, spec.build(loaded), system)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    options |= {"temperature": temperature} if temperature > 0 else {"temperature": None, "top_p": None, "top_k": None}
    code = 0
    with status_line() as status:
        try:
            for line in _lines():
                if line in ("/quit", "/exit"):
                    break
                if line == "/reset":
                    talk.reset()
                    print("forgotten", file=sys.stderr)
                elif line.startswith("/"):
                    print(HELP, file=sys.stderr)
                elif line:
                    talk.answer(line, options, status)
                    if not sys.stderr.isatty():
                        print(f"[{talk.held()}]", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            write_json(json, {"model": model, "cache": str(spec), "turns": talk.turns})
    return code


class Conversation:
    """Turns with one model and one cache. What was read stays read: each turn only adds tokens."""

    def __init__(self, model: Any, tokenizer: Any, cache: Any, system: str | None = None) -> None:
        self.model, self.tokenizer, self.cache, self.system = model, tokenizer, cache, system
        self.positions = learned_positions(model)
        self.turns: list[dict[str, Any]] = []
        ends = model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
        self.reset()

    def reset(self) -> None:
        """Forget everything said so far."""
        self.cache.reset()
        self.ids = torch.zeros(1, 0, dtype=torch.long)

    def held(self) -> str:
        """Kept and seen tokens and bytes, in words."""
        cache = self.cache
        kept = [layer.kept for layer in cache.kv_layers if layer.get_seq_length()]
        span = "nothing" if not kept else f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)}-{max(kept)}"
        return f"kept {span} of {cache.get_seq_length()} tokens, {show_bytes(cache.nbytes)}"

    def answer(self, text: str, options: dict[str, Any], status: Status) -> str:
        """Read a message, stream the answer to standard output, and return it."""
        ids = torch.cat([self.ids, torch.tensor([self._turn(text)], dtype=torch.long)], dim=1)
        if self.positions is not None:
            room = self.positions - ids.shape[1] + 1  # the last token of an answer is not read
            if room < 1:
                raise Wrong(
                    f"the conversation has {ids.shape[1]:,} tokens, and this model has learned positions for "
                    f"{self.positions:,} (max_position_embeddings): send shorter messages, or /reset in between"
                )
            options = options | {"max_new_tokens": min(room, options["max_new_tokens"])}
        began = time.perf_counter()
        streamer = _Stream(self, status)
        with _stopping() as stop:
            arguments = {cache_argument(self.model): self.cache}
            out = self.model.generate(
                ids.to(self.model.device),
                attention_mask=torch.ones_like(ids).to(self.model.device),
                streamer=streamer,
                stopping_criteria=[stop],
                pad_token_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0,
                **arguments,
                **options,
            )
        self.ids = out.cpu()
        new = self.ids[0, ids.shape[1] :]
        reply = self.tokenizer.decode(new, skip_special_tokens=True)
        figures = {"tokens": len(new), "seconds": time.perf_counter() - began, "stopped": stop.asked}
        held = {
            "seen": self.cache.get_seq_length(),
            "kept": [layer.kept for layer in self.cache.kv_layers],
            "bytes": self.cache.nbytes,
        }
        self.turns.append({"user": text, "reply": reply} | figures | held)
        return reply

    def _turn(self, text: str) -> list[int]:
        """The tokens that this message adds, in the model's chat template, or the plain text where it has none."""
        first = self.ids.shape[1] == 0
        if getattr(self.tokenizer, "chat_template", None) is None:
            opening = f"{self.system}\n" if first and self.system else "" if first else "\n"
            return list(self.tokenizer(opening + text + "\n", add_special_tokens=first).input_ids)
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        message = {"role": "user", "content": text}
        if first:
            whole = self._rendered([*said, message])
            return list(self.tokenizer(whole, add_special_tokens=False).input_ids)
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        added = self._rendered([*said, *before, message]).rpartition(_MARK)[2]
        last = int(self.ids[0, -1])
        if last in self.ends:  # the answer ended by itself, with what the template would add
            end = self.tokenizer.decode([last])
            added = added[len(end) :] if added.startswith(end) else added
        return list(self.tokenizer(added, add_special_tokens=False).input_ids)

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template raises: most often that it takes no system message
            raise Wrong(f"the model's chat template refuses this conversation: {error}; leave --system out") from error


def _lines() -> Iterator[str]:
    """What is typed or piped, line by line."""
    terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):  # a stray byte in a piped file must not end the conversation
        sys.stdin.reconfigure(errors="replace")
    while True:
        if terminal:
            try:
                line = input("> ")
            except EOFError:
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
            print(f"> {line.rstrip()}", flush=True)
        yield line.strip()


class _Stream(TextStreamer):
    """Text to standard output as it comes, and what the cache holds to the status line."""

    def __init__(self, talk: Conversation, status: Status) -> None:
        super().__init__(talk.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.talk, self.status = talk, status

    def put(self, value: Any) -> None:
        super().put(value)
        self.status.show(self.talk.held)


class _Stop(StoppingCriteria):
    """Stops an answer between two tokens: a forward pass that is cut in half would leave the cache half-written."""

    asked = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.asked, dtype=torch.bool, device=input_ids.device)


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """The first Ctrl-C asks for a stop, a second one interrupts."""
    stop = _Stop()

    def ask(signum: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Status:
    """The last line of a terminal, kept for one text; nothing where stderr is no terminal."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.last = 0.0

    def show(self, text: Any) -> None:
        """Show what `text()` gives, at most ten times a second."""
        now = time.monotonic()
        if not self.live or now - self.last < 0.1:
            return
        self.last = now
        columns, rows = shutil.get_terminal_size()
        sys.stdout.flush()
        sys.stderr.write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[7m {text()[: columns - 2]} \x1b[0m\x1b8")
        sys.stderr.flush()


@contextmanager
def status_line() -> Iterator[Status]:
    """Text scrolls above the last line as long as this is open."""
    live = sys.stderr.isatty() and sys.stdout.isatty()
    rows = shutil.get_terminal_size()[1]
    if live:
        sys.stderr.write(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A")
        sys.stderr.flush()
    try:
        yield Status(live)
    finally:
        if live:
            sys.stderr.write(f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8")
            sys.stderr.flush()
