"""find_sharing: which layers of a model may read the rows of which, found on a few texts.

`method="kvsharer"` is the search of KVSharer (arXiv 2410.18517): pairs of layers are tried in the order of how *unlike*
their keys and values are, and kept while the last hidden state stays near to the unshared model's. `method="kl"` asks
the question that matters instead: how far do the predictions move? It measures every layer with its nearest earlier
ones as sources, then adds one pair at a time, each the best of a few that are measured together with those chosen
before.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .result import METHODS, Sharing, plain_signature

LEAST_TOKENS = 8


def find_sharing(
    model: PreTrainedModel,
    texts: Any,
    layers_to_share: int,
    method: str = "kl",
    tokenizer: Any = None,
    *,
    tokens: int = 256,
    min_cosine: float = 0.5,
    sources: int = 3,
    tries: int = 4,
    scope: str = "full",
    progress: bool = True,
) -> Sharing:
    """Find `layers_to_share` layers that can do with the rows of earlier ones. Deterministic.

    Args:
        model: the model, in eval mode; it is left as it came.
        texts: some texts (with `tokenizer`) or id tensors `[1, T]`, one or a list. The first `tokens` tokens of each
            are used (as many as the shortest has, if fewer).
        layers_to_share: how many layers become followers.
        method: `"kl"`, or `"kvsharer"` as published: followers follow layers *unlike* them.
        tokenizer: for texts.
        min_cosine: of `"kvsharer"`: a pair is kept while the mean cosine of the last hidden states stays above.
        sources, tries: of `"kl"`: sources that are tried for each layer, and candidates measured for each pair added.
            About `layers * sources + layers_to_share * tries` passes over the texts are made.
        scope: `"all"` to share sliding and chunked layers too, as in `KVCache`.
        progress: show a bar on stderr if it takes longer than two seconds (where rich is installed).

    Raises:
        ValueError: impossible arguments; or fewer pairs than wanted can be had, saying how many.
        NotImplementedError: models that cannot share, see `CrossLayerSharedCache`.
    """
    from ..attention import detach, is_ours
    from .groups import layer_kinds

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"find_sharing needs the model itself, got {type(model).__name__}")
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}")
    for name, value in (("layers_to_share", layers_to_share), ("sources", sources), ("tries", tries)):
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` must be a positive whole number, got {value!r}")
    if isinstance(min_cosine, bool) or not isinstance(min_cosine, (int, float)) or not -1 <= min_cosine <= 1:
        raise ValueError(f"`min_cosine` must lie in [-1, 1], got {min_cosine!r}")
    if model.training:
        raise ValueError("the model is in training mode, where dropout would decide: call `model.eval()` first")
    kinds = layer_kinds(model.config, scope)
    found = [kind for kind in kinds if not isinstance(kind, str)]
    most = sum(kind in found[:index] for index, kind in enumerate(found))  # the first of each kind follows nobody
    if layers_to_share > most:
        raise ValueError(
            f"`layers_to_share` is {layers_to_share}, but at most {most} layers of this model can follow others"
        )
    windows = _windows(texts, tokenizer, tokens)
    ours = is_ours(model.config.get_text_config(decoder=True)._attn_implementation)
    try:
        with _bar(progress) as advance:
            search = _Search(model, windows, kinds, scope, advance)
            if method == "kvsharer":
                search.kvsharer(layers_to_share, float(min_cosine))
            else:
                search.greedy(layers_to_share, sources, tries)
    finally:
        if not ours:
            detach(model)
    signature = plain_signature(model.config)
    kl, cosine = search.measure(search.map)
    size = windows[0].shape[1]
    return Sharing(search.map, len(kinds), method, kl, cosine, search.tried, len(windows), size, signature)


class _Search:
    """The unshared model's answers on the texts, and the pairs chosen so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: list[torch.Tensor],
        kinds: Sequence[Any],
        scope: str,
        advance: Callable[[int], None],
    ) -> None:
        self.model, self.windows, self.kinds, self.scope, self.advance = model, windows, kinds, scope, advance
        self.map: dict[int, int] = {}
        self.tried: list[list[float]] = []
        self.known: dict[tuple[tuple[int, int], ...], tuple[float, float]] = {}
        self.keys: dict[int, torch.Tensor] = {}  # mean over the texts, [Hkv, T, D]
        self.values: dict[int, torch.Tensor] = {}
        self.wanted = [self._read(ids) for ids in windows]

    @torch.no_grad()
    def _read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[T, V]` and last hidden states `[T, D]` of the unshared model, noting keys and values."""
        log_probs, hidden, cache = self._forward(ids, None)
        for layer in cache.kv_layers:
            for table, rows in ((self.keys, layer.keys), (self.values, layer.values)):
                mean = rows[0].float() / len(self.windows)
                table[layer.layer_idx] = mean if layer.layer_idx not in table else table[layer.layer_idx] + mean
        return log_probs, hidden

    def _forward(self, ids: torch.Tensor, sharing: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        from ..cache import KVCache

        model = self.model
        # Windowed layers are taken over only where the attention goes through this library.
        cache = KVCache(model if self.scope == "all" else model.config, sharing=sharing, scope=self.scope)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        output = model(input_ids=ids.to(model.device), use_cache=True, output_hidden_states=True, **{name: cache})
        return output.logits[0].float().log_softmax(-1), output.hidden_states[-1][0].float(), cache

    @torch.no_grad()
    def measure(self, sharing: dict[int, int]) -> tuple[float, float]:
        """(divergence in nats a token, mean cosine of the last hidden states) with these pairs shared."""
        key = tuple(sorted(sharing.items()))
        if key not in self.known:
            kl = cosine = 0.0
            for ids, (wanted, state) in zip(self.windows, self.wanted, strict=True):
                got, hidden, _ = self._forward(ids, sharing)
                by_token = torch.nn.functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
                kl += max(0.0, float(by_token.mean())) / len(self.windows)
                cosine += float(torch.cosine_similarity(hidden, state, dim=-1).mean()) / len(self.windows)
            if not math.isfinite(kl) or not math.isfinite(cosine):
                raise ValueError("the predictions are not finite numbers: does the model overflow in its dtype?")
            self.known[key] = kl, min(1.0, max(-1.0, cosine))
            self.advance(1)
        return self.known[key]

    def fits(self, follower: int, source: int) -> bool:
        """Whether the pair can join those chosen: neither takes the other part already."""
        return follower not in self.map and source not in self.map and follower not in self.map.values()

    def pairs(self) -> list[tuple[int, int]]:
        """(follower, source) of one kind, the source before the follower."""
        return [
            (follower, source)
            for follower, kind in enumerate(self.kinds)
            for source in range(follower)
            if not isinstance(kind, str) and kind == self.kinds[source]
        ]

    def distance(self, follower: int, source: int) -> float:
        """Euclidean, of the mean keys and of the mean values of two layers, added."""
        return sum(float((table[follower] - table[source]).norm()) for table in (self.keys, self.values))

    def kvsharer(self, wanted: int, min_cosine: float) -> None:
        """The most unlike pairs first, each kept while the last hidden state stays near."""
        ranked = sorted(((self.distance(*pair), pair) for pair in self.pairs()), key=lambda item: (-item[0], item[1]))
        for distance, (follower, source) in ranked:
            if len(self.map) == wanted:
                return
            if not self.fits(follower, source):
                continue
            _, cosine = self.measure(self.map | {follower: source})
            self.tried.append([follower, source, distance, cosine])
            if cosine > min_cosine:
                self.map[follower] = source
        self._enough(wanted, f"at a cosine above {min_cosine}; lower `min_cosine`, or share fewer")

    def greedy(self, wanted: int, sources: int, tries: int) -> None:
        """The pair that moves the predictions least, again and again."""
        near: dict[int, list[int]] = {}
        for follower, source in self.pairs():
            near[follower] = [source, *near.get(follower, [])]
        alone: dict[tuple[int, int], float] = {}
        for follower, all_sources in near.items():
            for source in all_sources[:sources]:
                alone[follower, source] = self.measure({follower: source})[0]
                self.tried.append([follower, source, alone[follower, source], alone[follower, source]])
        while len(self.map) < wanted:
            for follower, all_sources in near.items():
                # Where the tried sources have become followers themselves, what they follow comes into question.
                options = [source for source in all_sources if self.fits(follower, source)]
                if options and not any((follower, source) in alone for source in options):
                    alone[follower, options[0]] = self.measure({follower: options[0]})[0]
            ranked = sorted((kl, pair) for pair, kl in alone.items() if self.fits(*pair))[:tries]
            if not ranked:
                self._enough(wanted, "because no layer is left that could follow another; share fewer")
            results = []
            for kl, (follower, source) in ranked:
                joint, _ = self.measure(self.map | {follower: source})
                results.append((joint, follower, source))
                if self.map:
                    self.tried.append([follower, source, kl, joint])
            _, follower, source = min(results)
            self.map[follower] = source

    def _enough(self, wanted: int, why: str) -> None:
        if len(self.map) < wanted:
            raise ValueError(f"only {len(self.map)} of {wanted} layers can share, {why}")


def _windows(texts: Any, tokenizer: Any, tokens: int) -> list[torch.Tensor]:
    """Ids `[1, T]` of every text, all of one length."""
    if type(tokens) is not int or tokens < LEAST_TOKENS:
        raise ValueError(f"`tokens` must be a whole number of at least {LEAST_TOKENS}, got {tokens!r}")
    parts = [texts] if isinstance(texts, (str, torch.Tensor)) else list(texts)
    if not parts:
        raise ValueError("`texts` is empty: there is nothing to measure on")
    found = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            if tokenizer is None:
                raise ValueError("`texts` is text: pass the `tokenizer` too, or ids [1, T]")
            # A tokenizer may be slow on what is cut away in any case.
            part = torch.tensor([list(tokenizer(part[: 32 * tokens]).input_ids)], dtype=torch.long)
        if not isinstance(part, torch.Tensor) or part.ndim != 2 or part.shape[0] != 1 or part.dtype != torch.long:
            raise ValueError(f"text {index} must be a string or a LongTensor [1, T]")
        found.append(part[:, :tokens])
    shortest = min(part.shape[1] for part in found)
    if shortest < LEAST_TOKENS:
        raise ValueError(f"a text has {shortest} tokens, at least {LEAST_TOKENS} are needed of each")
    return [part[:, :shortest] for part in found]


@contextmanager
def _bar(wanted: bool) -> Iterator[Callable[[int], None]]:
    """Counts passes on stderr, once two seconds are over, where rich is installed."""
    found = wanted and importlib.util.find_spec("rich") is not None
    if not found:
        yield lambda passes: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("finding layers that can share: pass {task.completed}"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, began = bar.add_task("", total=None), time.monotonic()

    def advance(passes: int) -> None:
        bar.advance(task, passes)
        if time.monotonic() - began > 2 and not bar.live.is_started:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
