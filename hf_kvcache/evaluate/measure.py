"""Fidelity: how far the predictions with a cache are from those of the full cache.

A long prompt goes through the cache in one call, then the text's next tokens are fed one at a time, whatever the model
would have said. After each of them the distribution over the vocabulary is compared with the one that the same model,
not attached, gives with a `DynamicCache` that was fed the same. Every cache reads every prompt itself, unless told
otherwise. Nothing is random: the same model, texts, specs and number of threads give the same figures.
"""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..attention import attach, detach, is_ours
from ..cache import KVCache, _model_and_config, _native_nbytes
from ..segments import PackedStore
from ..specs import CacheSpec, parse_spec
from .needles import ANSWER_TOKENS, CHARACTERS_PER_TOKEN, MOST, Needle, make_needle

# Windows of a text start at character FIRST + STEP * w and take CHARACTERS (more where a prompt needs more).
FIRST, STEP, CHARACTERS = 5_000, 30_000, 20_000

Maker = Callable[[Any], KVCache]


@dataclass(frozen=True)
class Window:
    """A piece of a text: `prompt` tokens, the tokens that are fed after them, and one more that is only predicted."""

    text: str
    index: int
    ids: torch.Tensor  # [1, prompt + tokens + 1]


@dataclass(frozen=True)
class Pass:
    """What feeding tokens one at a time left.

    Attributes:
        logits: `[tokens, vocabulary]`, after each token that was fed.
        held: of the cache, when it had read the prompt: see `_held`.
        bytes_after_prompt, bytes_at_end: bytes of storage.
    """

    logits: torch.Tensor
    held: dict[str, float]
    bytes_after_prompt: int
    bytes_at_end: int


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, str],
    caches: Sequence[str] | Mapping[str, Maker],
    *,
    prompt: int = 1024,
    tokens: int = 64,
    windows: int = 4,
    needles: int = 0,
    shared_prompt: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    keep_partial: bool = False,
) -> dict[str, Any]:
    """Measure caches on texts and return figures that are ready for JSON.

    Args:
        model: the model. It is left as it came: attached or not, training or not.
        tokenizer: called as `tokenizer(text).input_ids`; needles need `decode` too.
        texts: name -> text. Windows start at character 5,000 + 30,000 w of each.
        caches: specs (see `hf_kvcache.specs`), or name -> function that makes the cache for the model.
        prompt: tokens that go through the cache in one call.
        tokens: tokens that are then fed one at a time.
        windows: windows of each text.
        needles: prompts of `prompt` tokens with a planted code, spread over the texts; 0 leaves recall out.
        shared_prompt: hand caches that keep every token the keys and values of the full cache's prompt instead of
            running the model again. They are the same ones, since a prompt attends before anything is written; this
            saves about half of the time.
        progress: called as `(passes done, passes in all, what comes next)`.
        keep_partial: after Ctrl-C return what was measured, if anything was, with `interrupted` saying how much: the
            windows that were done, or of the first one the caches that were.

    Returns:
        A dict of `versions`, `arguments`, `model`, `full` (the `DynamicCache`) and `caches`, a list in the order given.
        Of each cache: `kl` (nats per token, from the full distribution to the cache's), `top1` (share of steps where
        both name the same token), `perplexity`, `bytes_after_prompt` and `bytes_at_end` (shares of the `DynamicCache`'s
        bytes), `rows_kept` (share of the prompt's rows), `row_bits` (bits of an element of a packed row, scales and
        zeros included; of an exact row where none is packed), `bits_per_element` (their product), means over
        `windows`, which has them one by one; `by_text` has the means of each text; `found` counts the codes found
        among those that the full cache finds (`full["found"]`), or is None without needles.

    Raises:
        ValueError: bad specs or arguments, texts that are too short. Before the model is run.
        NotImplementedError: a cache that does not fit the model. Before anything is measured.
    """
    for name, value, least in (
        ("prompt", prompt, 1),
        ("tokens", tokens, 1),
        ("windows", windows, 1),
        ("needles", needles, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` must be a whole number, at least {least}, got {value!r}")
    if needles > MOST:
        raise ValueError(f"`needles` must be at most {MOST}, got {needles}")
    if not texts:
        raise ValueError("`texts` is empty: there is nothing to read")
    makers = _makers(caches, prompt)
    pieces = [_window(tokenizer, name, text, w, prompt, tokens) for name, text in texts.items() for w in range(windows)]
    planted = _plant(tokenizer, texts, needles, prompt)
    inner, config = _model_and_config(model)
    if inner is None:
        raise ValueError("`model` is a config: measuring needs the model itself")
    attached, training = is_ours(config._attn_implementation), model.training
    model.eval()
    try:
        with torch.no_grad():
            for label, make in makers.items():
                _made(label, make, model)
            detach(inner)
            attention = str(config._attn_implementation)
            report = _Progress(progress, (len(pieces) + needles) * (1 + len(makers)))
            measured: list[list[dict[str, Any]]] = []
            asked: list[list[bool]] = []
            try:
                for piece in pieces:
                    measured.append([])
                    _measure(model, inner, piece, makers, prompt, shared_prompt, report, measured[-1])
                for _, needle in planted:
                    asked.append(_ask(model, inner, tokenizer, needle, makers, report))
            except KeyboardInterrupt:
                if not keep_partial or not measured or len(measured[0]) < 2:
                    raise
            report.finish()
    finally:
        model.train(training)
        attach(inner) if attached else detach(inner)
    done = [row for row in measured if len(row) == 1 + len(makers)]
    interrupted = None
    if len(done) < len(pieces) or len(asked) < len(planted):
        interrupted = {"windows_done": len(done), "windows": len(pieces), "needles_done": len(asked)}
        measured = done or measured[:1]
        makers = dict(list(makers.items())[: len(measured[0]) - 1])
        texts = {name: text for name, text in texts.items() if any(row[0]["text"] == name for row in measured)}
    arguments: dict[str, Any] = {"prompt": prompt, "tokens": tokens, "windows": windows, "needles": needles}
    arguments["shared_prompt"] = shared_prompt
    result = {
        "versions": _versions(),
        "arguments": arguments | {"texts": list(texts), "caches": list(makers)},
        "model": _about(model, attention),
        "full": _figures(0, texts, measured, asked),
        "caches": [{"spec": label} | _figures(n, texts, measured, asked) for n, label in enumerate(makers, start=1)],
        "needles": [_code(*place, answers) for place, answers in zip(planted, asked, strict=False)],
    }
    return result if interrupted is None else result | {"interrupted": interrupted}


# ---------------------------------------------------------------------- before the model is run


def _makers(caches: Sequence[str] | Mapping[str, Maker], prompt: int) -> dict[str, Maker]:
    """Label -> function that makes the cache. Specs are read and checked here."""
    if isinstance(caches, str):
        raise ValueError(f"`caches` must be a list of specs, got the text {caches!r}")
    if not caches:
        raise ValueError("`caches` is empty: there is nothing to measure")
    if isinstance(caches, Mapping):
        return dict(caches)

    def maker(spec: CacheSpec) -> Maker:
        return lambda model: spec.build(model, prompt)

    makers: dict[str, Maker] = {}
    for text in caches:
        spec = parse_spec(text)
        spec.check(prompt)
        if text in makers:
            raise ValueError(f"{text!r} is named twice")
        makers[text] = maker(spec)
    return makers


def _made(label: str, make: Maker, model: Any) -> KVCache:
    """The cache, or its refusal with the name that it was asked for by."""
    try:
        return make(model)
    except (NotImplementedError, ValueError) as error:
        raise type(error)(f"{label}: {error}") from error


def _window(tokenizer: Any, name: str, text: str, index: int, prompt: int, tokens: int) -> Window:
    needed = prompt + tokens + 1
    start = FIRST + STEP * index
    piece = text[start : start + max(CHARACTERS, CHARACTERS_PER_TOKEN * needed)]
    ids = list(tokenizer(piece).input_ids)[:needed] if piece else []
    if len(ids) < needed:
        raise ValueError(
            f"text {name!r} is too short: window {index + 1} starts at character {start:,} of {len(text):,} and has "
            f"{len(ids):,} tokens, but {needed:,} are needed. Ask for fewer windows or a shorter prompt."
        )
    return Window(name, index, torch.tensor([ids]))


def _plant(tokenizer: Any, texts: Mapping[str, str], count: int, tokens: int) -> list[tuple[str, Needle]]:
    """Text and prompt of each needle; the texts take turns."""
    names = list(texts)
    found = []
    for index in range(count):
        name = names[index % len(names)]
        try:
            found.append((name, make_needle(tokenizer, texts[name], index, count, tokens)))
        except ValueError as error:
            raise ValueError(f"text {name!r}: {error}") from error
    return found


# ---------------------------------------------------------------------- running


class _Progress:
    def __init__(self, tell: Callable[[int, int, str], None] | None, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0

    def begin(self, what: str) -> None:
        """Another pass begins."""
        if self._tell is not None:
            self._tell(self._done, self._total, what)
        self._done += 1

    def skip(self, passes: int) -> None:
        """So many passes are not needed."""
        self._done += passes

    def finish(self) -> None:
        if self._tell is not None:
            self._tell(self._total, self._total, "done")


def cache_argument(model: Any) -> str:
    """The name under which the model takes a cache: `cache`, or `past_key_values` in older transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits `[vocabulary]` after the last of `ids` `[1, n]`, which go through the cache."""
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {cache_argument(model): cache}
    if "logits_to_keep" in parameters:  # those of a long prompt may not fit into memory
        arguments["logits_to_keep"] = 1
    return model(ids.to(model.device), use_cache=True, **arguments).logits[0, -1].float()


def _full(inner: PreTrainedModel) -> DynamicCache:
    """The yardstick: transformers' own cache, on the model as it is without this library."""
    detach(inner)
    return DynamicCache(config=inner.config)


def _nbytes(cache: Any) -> int:
    return cache.nbytes if isinstance(cache, KVCache) else sum(_native_nbytes(layer) for layer in cache.layers)


def _read(cache: Any, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Hand `rows`, keys and values `[1, H, prompt, D]` of each layer, to a cache that needs nothing else of a prompt.

    False where the cache needs queries too, or has layers that are transformers' own.
    """
    if not rows or not isinstance(cache, KVCache) or cache.policy.drops or len(cache.kv_layers) < len(rows):
        return False
    for index, (keys, values) in enumerate(rows):
        cache.update(keys, values, index)
    return True


def _rows_of(full: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, or nothing where some layer does not hold every row.

    A `DynamicCache` grows by making new tensors, so these stay as they are.
    """
    if any(type(layer) is not DynamicLayer for layer in full.layers):
        return []
    return [(layer.keys, layer.values) for layer in full.layers]


def _decode(model: Any, window: Window, cache: Any, prompt: int) -> Pass:
    """Feed the window's tokens after the prompt, which `cache` has read."""
    after_prompt, held = _nbytes(cache), _held(cache)
    # The last id is only predicted.
    steps = [_forward(model, window.ids[:, i : i + 1], cache) for i in range(prompt, window.ids.shape[1] - 1)]
    return Pass(torch.stack(steps), held, after_prompt, _nbytes(cache))


def _held(cache: Any) -> dict[str, float]:
    """`rows_kept` and `row_bits` of the layers that this library holds, each layer by the size of its rows."""
    if not isinstance(cache, KVCache) or not cache.kv_layers:
        return {}
    kept = bits = total = 0.0
    for layer in cache.kv_layers:
        _, heads, key_dim, value_dim = layer.segments.shape
        weight = heads * (key_dim + value_dim)
        # Heads may hold different numbers of rows: slots without a token have a negative position.
        rows = (cache.kept_positions(layer.layer_idx) >= 0).sum(-1).double().mean().item()
        bits_of_row = 8.0 * layer.element_size
        if isinstance(layer.segments, PackedStore) and layer.segments.has_packed:
            bits_of_row = layer.segments.codec.bits_per_element(key_dim, value_dim)
        kept += weight * rows / layer.get_seq_length()
        bits += weight * bits_of_row
        total += weight
    return {"rows_kept": kept / total, "row_bits": bits / total}


def compare(full: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Figures of logits `other` against those of the full cache, both `[tokens, vocabulary]`; `targets` `[tokens]`.

    In double precision, since float32 rounding alone is about 1e-7 nats. A step at a time: vocabularies are large.
    """
    kl = same = nll = 0.0
    for want_logits, got_logits, target in zip(full, other, targets.tolist(), strict=True):
        want, got = want_logits.double().log_softmax(-1), got_logits.double().log_softmax(-1)
        kl += (want.exp() * (want - got)).sum().item()
        same += float(want.argmax() == got.argmax())
        nll -= got[target].item()
    count = len(full)
    return {"kl": max(0.0, kl / count), "top1": same / count, "nll": nll / count}


def _measure(
    model: Any,
    inner: PreTrainedModel,
    window: Window,
    makers: Mapping[str, Maker],
    prompt: int,
    shared_prompt: bool,
    report: _Progress,
    found: list[dict[str, Any]],
) -> None:
    """Append figures on one window to `found`: of the full cache, then of each cache."""
    where = f"{window.text} {window.index + 1}"
    targets = window.ids[0, prompt + 1 :]
    report.begin(f"{where}: full cache")
    yardstick = _full(inner)
    _forward(model, window.ids[:, :prompt], yardstick)
    rows = _rows_of(yardstick) if shared_prompt else []
    full = _decode(model, window, yardstick, prompt)
    place = {"text": window.text, "window": window.index}
    bytes_ = {"bytes_after_prompt": full.bytes_after_prompt, "bytes_at_end": full.bytes_at_end}
    found.append(place | {"nll": compare(full.logits, full.logits, targets)["nll"]} | bytes_)
    for label, make in makers.items():
        report.begin(f"{where}: {label}")
        cache = _made(label, make, model)
        if not _read(cache, rows):
            _forward(model, window.ids[:, :prompt], cache)
        done = _decode(model, window, cache, prompt)
        figures: dict[str, Any] = place | compare(full.logits, done.logits, targets)
        figures["bytes_after_prompt"] = done.bytes_after_prompt / full.bytes_after_prompt
        figures["bytes_at_end"] = done.bytes_at_end / full.bytes_at_end
        held = done.held or {"rows_kept": 1.0, "row_bits": 8.0 * model.dtype.itemsize}
        figures |= held | {"bits_per_element": held["rows_kept"] * held["row_bits"]}
        found.append(figures)


def _finds(model: Any, tokenizer: Any, needle: Needle, cache: Any) -> bool:
    """Whether the greedy continuation of the prompt has the code in it."""
    logits = _forward(model, needle.ids, cache)
    out = [int(logits.argmax())]
    while len(out) < ANSWER_TOKENS:
        out.append(int(_forward(model, torch.tensor([out[-1:]]), cache).argmax()))
    return needle.code in tokenizer.decode(out)


def _ask(
    model: Any, inner: PreTrainedModel, tokenizer: Any, needle: Needle, makers: Mapping[str, Maker], report: _Progress
) -> list[bool]:
    """Whether the full cache finds the code, then (if it does) each cache."""
    report.begin(f"code {needle.code}: full cache")
    if not _finds(model, tokenizer, needle, _full(inner)):
        report.skip(len(makers))
        return [False] * (1 + len(makers))
    found = [True]
    for label, make in makers.items():
        report.begin(f"code {needle.code}: {label}")
        found.append(_finds(model, tokenizer, needle, _made(label, make, model)))
    return found


# ---------------------------------------------------------------------- figures


_MEANS = ("kl", "top1", "bytes_after_prompt", "bytes_at_end", "rows_kept", "row_bits", "bits_per_element")


def _means(windows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over windows; the perplexity is that of all their tokens together."""

    def mean(name: str) -> float:
        return math.fsum(window[name] for window in windows) / len(windows)

    found = {name: mean(name) for name in _MEANS if name in windows[0]}
    return found | {"perplexity": math.exp(mean("nll"))}


def _figures(
    column: int,
    texts: Mapping[str, str],
    measured: Sequence[Sequence[dict[str, Any]]],
    asked: Sequence[Sequence[bool]],
) -> dict[str, Any]:
    """All figures of one cache; column 0 is the full one, whose bytes are bytes and not shares."""
    mine = [row[column] for row in measured]
    by_text = {name: _means([window for window in mine if window["text"] == name]) for name in texts}
    found = sum(answers[column] for answers in asked) if asked else None
    return _means(mine) | {"found": found, "by_text": by_text, "windows": mine}


def _code(text: str, needle: Needle, answers: Sequence[bool]) -> dict[str, Any]:
    found: dict[str, Any] = {"text": text, "depth": needle.depth, "code": needle.code}
    return found | {"tokens_from_end": needle.distance, "full": answers[0], "caches": list(answers[1:])}


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"python": platform.python_version()} | found


FACTS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
)


def config_facts(config: Any) -> dict[str, Any]:
    """What tells a config from those of other models, ready for JSON: names differ with where a model lies."""
    decoder = config.get_text_config(decoder=True)
    found = {name: getattr(decoder, name, None) for name in FACTS}
    return {name: value for name, value in found.items() if isinstance(value, (int, str))}


def _about(model: Any, attention: str) -> dict[str, Any]:
    name = getattr(model, "name_or_path", "") or type(model).__name__
    dtype = str(model.dtype).removeprefix("torch.")
    about = {"name": name, "dtype": dtype, "device": str(model.device), "attention": attention}
    return about | {"config": config_facts(model.config)}
