"""calibrate: a width for the keys and one for the values of every layer, under a budget of bits.

Layers differ in how coarse their rows may be before predictions change, and so do keys and values. For each layer, each
of the two and each width, the model predicts the end of a window of text while only these rows are as the codec would
leave them, and everything else is exact: the divergence from the model's own predictions is the sensitivity. The budget
is then spent where a bit removes most of it, as if sensitivities added up. They do not quite (errors of many layers
meet), but the order of the layers is what matters.
"""

from __future__ import annotations

import copy
import heapq
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from ..attention import signature_of
from ..cache import KVCache, _model_and_config, own_cache_reason
from ..codecs import KIVI, Codec, Rotated
from ..ops.packed import BITS
from ..segments import PackedStore

FORMAT_VERSION = 1
MAX_FILE_BYTES = 10_000_000
MAX_LAYERS = 4096
LEAST_TOKENS = 8  # that follow the prompt of a window
TEXT_TOKENS = 64  # that follow it where windows are made from text

PARTS = ("keys", "values")
_CODECS: dict[str, type[Rotated] | type[KIVI]] = {"Rotated": Rotated, "KIVI": KIVI}
_WIDTH_ARGUMENTS = ("nbits", "key_bits", "value_bits")
_ROUNDING = 1e-9  # bits per element

# For each layer [keys, values], of each of them a number for each width; None for a layer that no codec writes.
Table = list[list[list[float]] | None]


@dataclass
class Calibration:
    """The outcome of `calibrate`: `KVCache(model, codec=calibration.codec())`.

    Attributes:
        key_bits, value_bits: one width for each layer of the cache. Layers that no codec writes (sliding, linear) have
            the largest one, which is not used.
        target_bits: what was asked for, bits per element, scales and zeros included.
        bits: what was achieved, at most `target_bits`: mean over the layers that a codec writes.
        codec_name: `"Rotated"` or `"KIVI"`.
        codec_arguments: all other arguments of the codec.
        widths: the widths that were tried, ascending.
        sensitivities: `sensitivities[layer][0 keys, 1 values][width]`: mean KL divergence (nats per token) from the
            model's own predictions when only these rows are coarse. None for a layer that no codec writes.
        costs: bits per element that the keys, and the values, of a layer add to the layer's; indexed alike.
        signature: the architecture, as `hf_kvcache.attention.signature_of` has it.
        predicted_kl: sum of the sensitivities of the chosen widths (nats per token); a wider width counts as no worse
            than a narrower one, whatever noise was measured.
    """

    key_bits: list[int]
    value_bits: list[int]
    target_bits: float
    bits: float
    codec_name: str
    codec_arguments: dict[str, Any]
    widths: list[int]
    sensitivities: Table
    costs: Table
    signature: list[Any]
    predicted_kl: float

    def codec(self, **overrides: Any) -> Codec:
        """The codec with these widths. `overrides` replace its other arguments (`residual_length=...`)."""
        for name in _WIDTH_ARGUMENTS:
            if name in overrides:
                raise ValueError(f"`{name}` is what was calibrated; for widths of your own make the codec yourself")
        arguments = self.codec_arguments | overrides
        return _kind(self.codec_name)(key_bits=list(self.key_bits), value_bits=list(self.value_bits), **arguments)

    def at(self, target_bits: float) -> Calibration:
        """The same measurements, allotted for another target (mean bits per element). Runs no model."""
        found = allot(self.sensitivities, self.costs, self.widths, target_bits)
        mine = {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(self)}
        return Calibration(**mine | found | {"target_bits": float(target_bits)})

    def check(self, model: Any) -> None:
        """Raise `ValueError` where this was measured on another architecture than that of `model` (or config)."""
        given = _signature(_model_and_config(model)[1])
        if given != self.signature:
            raise ValueError(
                f"this calibration was made for another model: {self.signature} against {given}. Run "
                "`calibrate(model, ...)` for this one."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all."""
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"cannot save to {path}: the folder {folder} does not exist")
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, allow_nan=False)
        temporary = f"{os.fspath(path)}.part{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file that `save` wrote. Nothing in it is trusted: `ValueError` says what is wrong with it."""
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"{path}: longer than {MAX_FILE_BYTES:,} bytes, so not a calibration")
        try:
            content = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: truncated, altered or not JSON ({error})") from error
        try:
            return _read(content)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error


@torch.no_grad()
def calibrate(
    model: Any,
    input_ids: torch.Tensor | str | Sequence[torch.Tensor | str],
    target_bits: float,
    codec: type[Codec] | str = Rotated,
    widths: Sequence[int] = (2, 3, 4),
    prompt_length: int = 1024,
    progress: bool = True,
    tokenizer: Any = None,
    **codec_arguments: Any,
) -> Calibration:
    """Measure how sensitive each layer is, and allot widths within `target_bits`. Deterministic.

    The model runs `windows * (2 + 2 * layers * len(widths))` times: once over the prompt of each window, otherwise over
    the tokens that follow it. Short windows of typical text do.

    Args:
        model: the model; it is left as it is, and its cache is transformers' own.
        input_ids: a window of text: ids `[1, T]`, or text with `tokenizer`, of which the prompt and the next 64 tokens
            are taken. Or a list of windows.
        target_bits: mean bits per element of a packed row, scales and zeros included, over layers; never exceeded.
        codec: `Rotated` or `KIVI`, the class or its name.
        widths: bits to choose from, of 2, 3, 4 and 8.
        prompt_length: tokens of each window that are read as the prompt; the rest is predicted.
        progress: whether to show a progress bar on stderr, where rich is installed.
        tokenizer: makes ids of text.
        codec_arguments: the codec's other arguments. Few exact tokens make the measurement see more packed ones.

    Raises:
        ValueError: a target out of reach, too few tokens, an unknown codec, impossible widths or arguments.
        NotImplementedError: a model without full-attention layers, or one that a codec does not serve.
    """
    inner, config = _model_and_config(model)
    if inner is None:
        raise ValueError("`model` is a config: calibration needs the model itself")
    _check_model(inner, config)
    tried = _widths(widths)
    target = _target(target_bits)
    kind = _kind(codec)
    for name in _WIDTH_ARGUMENTS:
        if name in codec_arguments:
            raise ValueError(f"`{name}` is what calibration finds; give the choices as `widths`")
    make: Callable[..., Codec] = partial(kind, **codec_arguments)
    caches: dict[int, Callable[[], KVCache]] = {
        width: partial(KVCache, config, codec=make(key_bits=width, value_bits=width)) for width in tried
    }
    for cache in caches.values():
        cache()  # refusals come before the model is run
    plain = make(key_bits=tried[0], value_bits=tried[0])
    _check_prompt(prompt_length, plain)
    windows = [_window(part, prompt_length, tokenizer, i) for i, part in enumerate(_listed(input_ids))]

    training = [module for module in inner.modules() if module.training]
    inner.eval()
    try:
        table, costs = _measure(inner, windows, prompt_length, tried, make, caches, target, progress)
    finally:
        for module in training:  # not all of a model need be in training mode
            module.training = True
    arguments = {name: value for name, value in plain.describe().items() if name not in _WIDTH_ARGUMENTS}
    found = allot(table, costs, tried, target)
    return Calibration(
        target_bits=target,
        codec_name=kind.__name__,
        codec_arguments=arguments,
        widths=tried,
        sensitivities=table,
        costs=costs,
        signature=_signature(config),
        **found,
    )


def allot(sensitivities: Table, costs: Table, widths: Sequence[int], target_bits: float) -> dict[str, Any]:
    """Spend `target_bits` (bits per element, mean over layers) greedily.

    All start with the smallest width; the keys or values whose sensitivity falls most for a bit go up, until nothing
    fits any more. Where the fall is not convex, a step may skip a width. Best possible up to the last step, if
    sensitivities add up.

    Returns `key_bits`, `value_bits`, `bits` and `predicted_kl`, see `Calibration`.

    Raises `ValueError` for a target out of reach.
    """
    target = _check_range(costs, target_bits)
    layers = [index for index, cost in enumerate(costs) if cost is not None]
    chosen = {(layer, part): 0 for layer in layers for part in range(2)}
    # Noise may show a wider width as worse.
    falling = {(layer, part): _falling(_row(sensitivities, layer, part)) for layer, part in chosen}
    moves: list[tuple[float, int, int, int, int]] = []  # (-nats per bit, layer, part, to, from)

    def offer(layer: int, part: int) -> None:
        nats, bits, at = falling[layer, part], _row(costs, layer, part), chosen[layer, part]
        for to in range(at + 1, len(widths)):
            heapq.heappush(moves, ((nats[to] - nats[at]) / (bits[to] - bits[at]), layer, part, to, at))

    def spent() -> float:
        return math.fsum(_row(costs, layer, part)[at] for (layer, part), at in chosen.items()) / len(layers)

    for layer, part in chosen:
        offer(layer, part)
    while moves:
        _, layer, part, to, at = heapq.heappop(moves)
        if chosen[layer, part] != at:
            continue  # it went another way
        chosen[layer, part] = to
        if spent() > target + _ROUNDING:
            chosen[layer, part] = at  # never fits again: what is left only shrinks
        else:
            offer(layer, part)
    bits = [[widths[chosen.get((index, part), -1)] for index in range(len(costs))] for part in range(2)]
    predicted = math.fsum(falling[item][at] for item, at in chosen.items())
    return {"key_bits": bits[0], "value_bits": bits[1], "bits": spent(), "predicted_kl": predicted}


def _row(table: Table, layer: int, part: int) -> list[float]:
    both = table[layer]
    if both is None:
        raise ValueError(f"layer {layer} has costs but no sensitivities")
    return both[part]


def _falling(values: Sequence[float]) -> list[float]:
    """Each value, or the least before it."""
    return [min(values[: index + 1]) for index in range(len(values))]


def _check_range(costs: Table, target_bits: float) -> float:
    target = _target(target_bits)
    held = [cost for cost in costs if cost is not None]
    low, high = (math.fsum(part[end] for cost in held for part in cost) / len(held) for end in (0, -1))
    if not low - _ROUNDING <= target <= high + _ROUNDING:
        raise ValueError(
            f"`target_bits` of {target:g} is out of reach: with these widths and this codec it must lie between "
            f"{low:g} and {high:g} bits per element, scales and zeros included"
        )
    return target


# ---------------------------------------------------------------------- arguments


def _target(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"`target_bits` must be a number of bits per element, got {value!r}")
    return float(value)


def _kind(codec: Any) -> type[Rotated] | type[KIVI]:
    name = codec if isinstance(codec, str) else getattr(codec, "__name__", None)
    kind = _CODECS.get(name) if isinstance(name, str) else None
    if kind is None or not (isinstance(codec, str) or codec is kind):
        raise ValueError(f"unknown codec {codec!r}: one of {', '.join(_CODECS)} from hf_kvcache.codecs, or its name")
    return kind


def _check_model(model: PreTrainedModel, config: Any) -> None:
    if config.is_encoder_decoder:
        raise NotImplementedError(
            "calibration reads the prompt into the cache, which an encoder-decoder model does not"
        )
    reason = own_cache_reason(model)
    if reason is None:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        if not kinds & {DynamicLayer, LinearAttentionAndFullAttentionLayer}:
            reason = "it has no full-attention layer, and codecs write no others"
    if reason is not None:
        raise NotImplementedError(f"there is nothing to calibrate in {type(model).__name__}: {reason}")


def _widths(widths: Any) -> list[int]:
    if not isinstance(widths, (list, tuple)) or any(type(width) is not int or width not in BITS for width in widths):
        raise ValueError(f"`widths` must be a list of widths out of {', '.join(map(str, BITS))}, got {widths!r}")
    if len(widths) < 2 or len(set(widths)) != len(widths):
        raise ValueError(f"`widths` must name two widths or more, each once, got {widths!r}")
    return sorted(widths)


def _check_prompt(prompt_length: Any, codec: Codec) -> None:
    block = codec.for_layer(0, 1, 64, 64).block  # the same for every size
    least = codec.residual_length + codec.num_sink_tokens + block
    if type(prompt_length) is not int or prompt_length < least:
        raise ValueError(
            f"`prompt_length` must be at least {least}, got {prompt_length!r}: the codec leaves the newest "
            f"{codec.residual_length} and the first {codec.num_sink_tokens} tokens exact and writes blocks of {block}, "
            "so nothing would be packed. Use longer windows or a smaller `residual_length`."
        )


def _listed(input_ids: Any) -> list[Any]:
    if isinstance(input_ids, torch.Tensor) and input_ids.ndim == 2:
        return list(input_ids[:, None])
    parts = list(input_ids) if isinstance(input_ids, (list, tuple)) else [input_ids]
    if not parts:
        raise ValueError("`input_ids` is empty: there is no text to calibrate on")
    return parts


def _window(part: Any, prompt_length: int, tokenizer: Any, index: int) -> torch.Tensor:
    """Ids `[1, T]`."""
    if isinstance(part, str):
        if tokenizer is None:
            raise ValueError("`input_ids` is text: pass the `tokenizer` too, or ids [1, T]")
        part = torch.tensor([list(tokenizer(part).input_ids)[: prompt_length + TEXT_TOKENS]], dtype=torch.long)
    if not isinstance(part, torch.Tensor) or part.ndim != 2 or part.shape[0] != 1 or part.dtype != torch.long:
        got = f"{part.dtype} {list(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
        raise ValueError(f"`input_ids` must be a LongTensor [1, T], or a list of them, but window {index} is {got}")
    if part.shape[1] < prompt_length + LEAST_TOKENS:
        raise ValueError(
            f"window {index} has {part.shape[1]} tokens: a prompt of {prompt_length} and at least {LEAST_TOKENS} to "
            f"predict are needed. Give a longer text, or a smaller `prompt_length`."
        )
    return part


def _signature(config: Any) -> list[Any]:
    """`signature_of` as JSON gives it back."""
    return json.loads(json.dumps(signature_of(config.get_text_config(decoder=True))))


# ---------------------------------------------------------------------- measuring


def _measure(
    model: PreTrainedModel,
    windows: list[torch.Tensor],
    prompt_length: int,
    widths: list[int],
    make: Callable[..., Codec],
    caches: dict[int, Callable[[], KVCache]],
    target: float,
    progress: bool,
) -> tuple[Table, Table]:
    """Sensitivities (nats per token) and costs (bits per element)."""
    sums: dict[tuple[int, int, int], float] = {}
    layers = _coded(caches[widths[0]]())
    costs: Table = []
    with _bar(progress, len(windows) * (2 + 2 * len(layers) * len(widths))) as advance:
        for ids in windows:
            ids = ids.to(model.device)
            prompt, rest = ids[:, :prompt_length], ids[:, prompt_length:]
            full = DynamicCache(config=model.config)
            _forward(model, prompt, full, logits_to_keep=1)
            advance()
            if not costs:
                costs = _costs(full, layers, widths, make)
                _check_range(costs, target)
            wanted = _log_probs(model, rest, _copy(full))
            advance()
            for n, width in enumerate(widths):
                coarse = _coarse(full, layers, caches[width]())
                for layer in layers:
                    for part, name in enumerate(PARTS):
                        cache = _copy(full)
                        setattr(cache.layers[layer], name, coarse[layer][part])
                        kl = _divergence(wanted, _log_probs(model, rest, cache))
                        if not math.isfinite(kl):
                            raise ValueError(
                                f"the predictions with {name} of layer {layer} in {width} bits are not finite numbers: "
                                "does the model overflow in its dtype? Try float32 or bfloat16."
                            )
                        sums[layer, part, n] = sums.get((layer, part, n), 0.0) + kl
                        advance()
    table: Table = [None] * len(costs)
    for layer in layers:
        table[layer] = [[sums[layer, part, n] / len(windows) for n in range(len(widths))] for part in range(2)]
    return table, costs


def _coded(cache: KVCache) -> list[int]:
    """The layers that the codec writes."""
    return [layer.layer_idx for layer in cache.kv_layers if isinstance(layer.segments, PackedStore)]


def _forward(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, **more: Any) -> torch.Tensor:
    """Logits `[1, T, vocabulary]` of `ids`, which go through the cache."""
    parameters = inspect.signature(model.forward).parameters
    more = {name: value for name, value in more.items() if name in parameters}
    more["cache" if "cache" in parameters else "past_key_values"] = cache
    return model(input_ids=ids, use_cache=True, **more).logits


def _log_probs(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    return _forward(model, ids, cache)[0].float().log_softmax(-1)  # [T, vocabulary]


def _divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL divergence of `got` from `wanted`, log-probabilities `[T, vocabulary]`, in nats per token."""
    by_token = torch.nn.functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
    return max(0.0, by_token.mean().item()) if bool(by_token.isfinite().all()) else math.nan


def _copy(full: DynamicCache) -> DynamicCache:
    """A cache to continue from, which leaves `full` as it is. Growing a `DynamicLayer` makes new tensors."""
    cache = copy.copy(full)
    cache.layers = [copy.copy(x) if type(x) is DynamicLayer else copy.deepcopy(x) for x in full.layers]
    return cache


def _coarse(full: DynamicCache, layers: list[int], cache: KVCache) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer as `cache` gives them back: some rows exact, the others packed."""
    found = {}
    for index in layers:
        layer = cache.layers[index]
        layer.update(full.layers[index].keys, full.layers[index].values)
        layer.settle()
        if not layer.segments.has_packed:
            raise ValueError(f"layer {index} packed nothing of the prompt: use a longer `prompt_length`")
        found[index] = (layer.keys, layer.values)
        layer.reset()  # one packed layer at a time
    return found


def _costs(full: DynamicCache, layers: list[int], widths: list[int], make: Callable[..., Codec]) -> Table:
    """What each width of the keys, and of the values, adds to the bits per element of a layer."""
    count = len(full.layers)
    known: dict[tuple[int, int], list[list[float]]] = {}  # making a codec for a layer takes a while

    def costs_of(layer: int, key_dim: int, value_dim: int) -> list[list[float]]:
        def bits(key_bits: int, value_bits: int) -> float:
            codec = make(key_bits=key_bits, value_bits=value_bits)
            return codec.for_layer(layer, count, key_dim, value_dim).bits_per_element(key_dim, value_dim)

        half = bits(widths[0], widths[0]) / 2
        return [[bits(w, widths[0]) - half for w in widths], [bits(widths[0], w) - half for w in widths]]

    table: Table = [None] * count
    for layer in layers:
        size = (full.layers[layer].keys.shape[-1], full.layers[layer].values.shape[-1])
        if size not in known:
            known[size] = costs_of(layer, *size)
        table[layer] = copy.deepcopy(known[size])
    return table


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr where rich is installed; gives the function that advances it."""
    try:
        if not wanted:
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("calibrating", total=total)
        yield lambda: bar.advance(task)


# ---------------------------------------------------------------------- files


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _read(content: Any) -> Calibration:
    """The calibration in the content of a file, every field checked."""
    if not isinstance(content, dict):
        raise ValueError("holds no calibration")
    if content.get("format_version") != FORMAT_VERSION or type(content["format_version"]) is not int:
        raise ValueError(f"format version {content.get('format_version')!r}, this version reads {FORMAT_VERSION}")
    names = {field.name for field in fields(Calibration)}
    given = set(content) - {"format_version"}
    if given != names:
        raise ValueError(f"lacks the fields {sorted(names - given)} and has unknown ones {sorted(given - names)}")
    widths = _widths(content["widths"])
    if widths != content["widths"]:
        raise ValueError("`widths` are not ascending")
    key_bits, count = content["key_bits"], -1
    if isinstance(key_bits, list):
        count = len(key_bits)
    if not 1 <= count <= MAX_LAYERS:
        raise ValueError(f"`key_bits` must list 1 to {MAX_LAYERS} layers")
    for name in ("key_bits", "value_bits"):
        bits = content[name]
        if not isinstance(bits, list) or len(bits) != count:
            raise ValueError(f"`{name}` must list {count} layers, as `key_bits` does")
        if any(type(width) is not int or width not in widths for width in bits):
            raise ValueError(f"`{name}` has widths other than {widths}")
    for name in ("sensitivities", "costs"):
        _check_table(name, content[name], count, len(widths))
    for layer, (nats, bits) in enumerate(zip(content["sensitivities"], content["costs"], strict=True)):
        if (nats is None) != (bits is None):
            raise ValueError(f"layer {layer} has only one of sensitivities and costs")
        if bits is not None and any(a >= b for row in bits for a, b in zip(row, row[1:], strict=False)):
            raise ValueError(f"`costs` of layer {layer} do not grow with the width")
    if all(bits is None for bits in content["costs"]):
        raise ValueError("`costs` names no layer that a codec writes")
    for name in ("target_bits", "bits", "predicted_kl"):
        _check_number(f"`{name}`", content[name])
    _check_signature(content["signature"])
    if not isinstance(content["codec_name"], str):
        raise ValueError("`codec_name` is no text")
    arguments = content["codec_arguments"]
    if not isinstance(arguments, dict) or any(name in arguments for name in _WIDTH_ARGUMENTS):
        raise ValueError("`codec_arguments` must name the codec's arguments other than widths")
    if any(type(value) not in (bool, int, str, type(None)) for value in arguments.values()):
        raise ValueError("`codec_arguments` must be whole numbers and words")
    found = Calibration(**{name: content[name] for name in names})
    found.codec()
    _check_sums(found)
    return found


def _check_number(what: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value <= 1e9:  # no NaN, nor an integer too long for a float
        raise ValueError(f"{what} must be a finite number, not negative, got {str(value)[:40]}")


def _check_table(name: str, table: Any, layers: int, widths: int) -> None:
    if not isinstance(table, list) or len(table) != layers:
        raise ValueError(f"`{name}` must list {layers} layers")
    for layer, parts in enumerate(table):
        if parts is None:
            continue
        if not isinstance(parts, list) or len(parts) != len(PARTS):
            raise ValueError(f"`{name}` of layer {layer} must be a pair, of keys and of values")
        for row in parts:
            if not isinstance(row, list) or len(row) != widths:
                raise ValueError(f"`{name}` of layer {layer} must have {widths} numbers, one for each width")
            for value in row:
                _check_number(f"`{name}` of layer {layer}", value)


def _check_signature(signature: Any) -> None:
    def plain(value: Any) -> bool:
        return value is None or type(value) in (int, str)

    fine = isinstance(signature, list) and 1 <= len(signature) <= 64
    if not fine or not all(plain(x) or (isinstance(x, list) and all(map(plain, x))) for x in signature):
        raise ValueError("`signature` must list a model type and sizes")


def _check_sums(found: Calibration) -> None:
    """The totals must be those of the tables."""
    bits, nats = [], []
    coded = 0
    for layer, cost in enumerate(found.costs):
        if cost is None:
            continue
        coded += 1
        for part, width in enumerate((found.key_bits[layer], found.value_bits[layer])):
            at = found.widths.index(width)
            bits.append(cost[part][at])
            nats.append(_falling(_row(found.sensitivities, layer, part))[at])
    if abs(math.fsum(bits) / coded - found.bits) > 1e-6 or found.bits > found.target_bits + 1e-6:
        raise ValueError(f"`bits` of {found.bits} are not those of the widths that it lists, or exceed the target")
    if abs(math.fsum(nats) - found.predicted_kl) > 1e-6 * max(1.0, found.predicted_kl):
        raise ValueError(f"`predicted_kl` of {found.predicted_kl} is not the sum of the sensitivities that it lists")
