"""Bytes of every technique for one model: what `hf-kvcache estimate` prints.

Every figure is the formula of the cache itself (`KVCache.expected_bytes`), asked of a cache that was made for the model
on the meta device, so that an estimate and what a real cache holds are one thing.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig

from ..cache import KVCache
from ..mla import plan_mla
from ..mla.host import attention_modules, inspect_hosts
from ..offload.rules import Away, away_bytes
from ..specs import SIZES, CacheSpec, parse_spec
from .sizes import ModelSizes, load_config, measure_sizes

STOCK = "DynamicCache"
# Every technique and the combinations that are of use. What a model cannot take is listed with the reason.
SPECS = (
    "kv",
    "paged:block_size=64",
    "float8",
    "kivi-4",
    "kivi-2",
    "rotated-4",
    "rotated-3-2",
    "rotated-2",
    "latent-8",
    "latent-4",
    "snapkv:max_capacity_prompt=0.25",
    "h2o:heavy_ratio=0.1,recent_ratio=0.1",
    "window:window_length=1024",
    "snapkv:max_capacity_prompt=0.25+rotated-4",
    "h2o:heavy_ratio=0.1,recent_ratio=0.1+rotated-4",
    "window:window_length=1024+kivi-4",
    "sharing:factor=2",
    "rotated-4+sharing:factor=2",
    "offload:resident_length=1024",
    "rotated-4+offload:resident_length=1024",
)
WINDOWED = ("kv:scope=all",)  # for models with sliding layers
MLA_KEPT = (0.5, 0.25)  # shares of the bytes that a conversion to latent attention is counted with
# Beyond these nothing is searched for: the answer is "any".
MOST_TOKENS, MOST_BATCH = 1 << 27, 1 << 20

Count = Callable[[int, int], int]  # bytes of a batch and a context


@dataclass
class Row:
    """One line of the table.

    Attributes:
        cache: the spec (`from_spec` builds it), or `DynamicCache`, or a conversion.
        lossless: whether its tokens are those of the full cache.
        bytes_per_sequence, bytes_total: of the cache in all tiers, for one sequence and for the batch.
        device_bytes: what stays on the compute device, with the buffers that pages are fetched to.
        host_bytes: of `bytes_total`, what is in host memory or on disk.
        ratio: of the bytes of the `DynamicCache`.
        with_weights: `device_bytes` and the weights.
        fits: whether that fits into the memory given; None where none was.
        longest_context, largest_batch: what fits at this batch and at this context; None is "any".
        note: what to know about it.
    """

    cache: str
    lossless: bool
    bytes_per_sequence: int
    bytes_total: int
    device_bytes: int
    host_bytes: int
    ratio: float
    with_weights: int
    fits: bool | None = None
    longest_context: int | None = None
    largest_batch: int | None = None
    note: str = ""


@dataclass
class Estimate:
    """Everything about one model; `as_dict` is ready for JSON."""

    model: str
    model_type: str
    dtype: str
    batch: int
    context: int
    memory: int | None
    parameters: int
    weights_bytes: int
    trained_length: int | None
    layers: dict[str, int]
    rows: list[Row]
    refused: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Sized:
    """Bytes of one cache of one model, for any batch and context."""

    def __init__(self, sizes: ModelSizes, spec: CacheSpec) -> None:
        self.sizes, self.spec = sizes, spec
        shares = (isinstance(v, float) and k in SIZES for part in spec.parts for k, v in part.arguments.items())
        self.by_prompt = any(shares)
        self._made: dict[int, KVCache] = {}

    def cache(self, tokens: int) -> KVCache:
        """The cache for prompts of so many tokens. Raises as its class does."""
        key = tokens if self.by_prompt else 0
        if key not in self._made:
            self._made[key] = self._build(tokens)
        return self._made[key]

    def _build(self, tokens: int) -> KVCache:
        spec = self.spec
        spec.check(tokens)
        policy = spec.policy.made(tokens)
        # A window asks the model how its keys turn with position; a model without numbers cannot say, and bytes do not
        # depend on it.
        policy.prepare = lambda model: policy
        others = {part.technique.kind: part.made(tokens) for part in spec.parts if part.technique.kind != "policy"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scope = spec.policy.arguments.get("scope", "full")
            try:
                cache = KVCache(self.sizes.model, policy=policy, scope=scope, **others)
            except NotImplementedError as error:  # it names its class, which with another policy drops nothing
                words = str(error).replace("KVCache drops tokens", f"{spec.policy.name} drops tokens")
                raise NotImplementedError(words.replace("Use KVCache, which keeps", "Use kv, which keeps")) from error
        if len(cache.layers) != len(self.sizes.layers):
            raise NotImplementedError(
                f"{self.sizes.name} makes {len(self.sizes.layers) - len(cache.layers)} of its cache layers while it "
                "runs, so its bytes have no formula; measure `cache.nbytes`"
            )
        return cache

    def total(self, batch: int, tokens: int) -> int:
        return self.sizes.bytes_of(self.cache(tokens), batch, tokens)

    def away(self, batch: int, tokens: int) -> Away:
        """What has left the compute device, and the buffers there that it is fetched to."""
        cache = self.cache(tokens)
        if cache.offload is None:
            return Away(0, 0)
        return away_bytes(cache, self.sizes.shapes, batch, tokens, self.sizes.dtype)

    def device(self, batch: int, tokens: int) -> int:
        """What stays on the compute device, buffers included."""
        away = self.away(batch, tokens)
        return self.total(batch, tokens) - away.moved + away.staging


def estimate(
    model: str | PreTrainedConfig | ModelSizes,
    context: int,
    batch: int = 1,
    memory: int | None = None,
    specs: Sequence[str] | None = None,
    weight_bits: float | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Estimate:
    """Bytes of every technique for a model that need not be there: nothing is loaded but its config.

    Args:
        model: a Hub id, a folder, a `config.json` or a preset; a config; or what `measure_sizes` returned.
        context: tokens of each sequence, prompt and answer together.
        batch: sequences.
        memory: bytes of the compute device, for what fits.
        specs: caches, see `hf_kvcache.specs`; None: all that are of use.
        weight_bits: bits of a weight, for checkpoints that are quantized; None: those of the dtype.
        progress: called as `(done, of all, what comes next)`.

    Returns an `Estimate`, whose `rows` have the figures; `as_dict()` is ready for JSON.

    Raises:
        ValueError: specs that cannot be, sizes below 1, names that lead nowhere, types that are not known.
        NotImplementedError: models without a key/value cache, or with one that cannot be counted.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    sizes = model if isinstance(model, ModelSizes) else _sizes_of(model)
    asked = [parse_spec(spec) for spec in (_specs(sizes) if specs is None else specs)]
    weights = round(sizes.parameters * (weight_bits or 8 * sizes.dtype.itemsize) / 8)
    full = sizes.native_bytes(batch, context)
    room = None if memory is None else memory - weights
    rows: list[Row] = []
    refused: dict[str, str] = {}
    steps = 1 + len(asked) + len(MLA_KEPT)

    def add(label: str, lossless: bool, total: Count, device: Count, host: int = 0, note: str = "") -> None:
        held, on_device = total(batch, context), device(batch, context)
        ratio = held / max(1, full)
        row = Row(label, lossless, total(1, context), held, on_device, host, ratio, on_device + weights, note=note)
        if room is not None:
            row.fits = on_device <= room
            row.longest_context = _most(lambda tokens: _fits(device, batch, tokens, room), MOST_TOKENS)
            row.largest_batch = _most(lambda count: device(count, context) <= room, MOST_BATCH)
        rows.append(row)

    progress(0, steps, STOCK)
    add(STOCK, True, sizes.native_bytes, sizes.native_bytes, note="transformers' own")
    for done, spec in enumerate(asked, start=1):
        progress(done, steps, str(spec))
        sized = Sized(sizes, spec)
        try:
            sized.cache(context)
        except (NotImplementedError, ValueError) as error:
            if specs is not None and len(asked) == 1:
                raise
            refused[str(spec)] = str(error)
            continue
        add(str(spec), spec.lossless, sized.total, sized.device, sized.away(batch, context).moved, _note(spec))
    why = why_not_converted(sizes)
    if specs is None and why is not None:
        refused["convert_to_mla"] = why
    elif specs is None:
        for keep in MLA_KEPT:
            progress(steps - 1, steps, f"MLA {keep}")
            latent = converted(sizes, keep)
            if latent is not None:
                add(f"convert_to_mla(kv_keep={keep})", False, latent, latent, note="another model: convert, then heal")
    progress(steps, steps, "done")
    kinds: dict[str, int] = {}
    for layer in sizes.layers:
        kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    return Estimate(
        sizes.name,
        sizes.config.model_type,
        str(sizes.dtype).removeprefix("torch."),
        batch,
        context,
        memory,
        sizes.parameters,
        weights,
        sizes.trained_length,
        kinds,
        rows,
        refused,
    )


def _sizes_of(model: str | PreTrainedConfig) -> ModelSizes:
    if isinstance(model, str):
        return measure_sizes(load_config(model), name=model)
    if not isinstance(model, PreTrainedConfig):
        raise ValueError(f"`model` must be a name, a config or sizes, got {type(model).__name__}")
    return measure_sizes(model)


def _specs(sizes: ModelSizes) -> list[str]:
    windowed = any(layer.window is not None for layer in sizes.layers)
    latent = getattr(sizes.decoder, "kv_lora_rank", None) is not None
    found = [spec for spec in SPECS if latent or not spec.startswith("latent")]
    return found + (list(WINDOWED) if windowed else [])


def _note(spec: CacheSpec) -> str:
    if spec.offload is not None:
        return "older rows in host memory"
    if spec.part("sharing") is not None:
        return "needs healing"
    if spec.codec is not None and spec.policy.arguments.get("scope") == "all":
        return "an upper bound: sliding layers are counted whole"
    return ""


def _fits(device: Callable[[int, int], int], batch: int, tokens: int, room: int) -> bool:
    try:
        return device(batch, tokens) <= room
    except ValueError:  # a share of so few tokens that the technique cannot be made for them
        return room > 0


def _most(fits: Callable[[int], bool], bound: int) -> int | None:
    """The largest number up to `bound` that fits (0: not even 1); None where `bound` does."""
    if fits(bound):
        return None
    low, high = 0, 1
    while high < bound and fits(high):
        low, high = high, high * 2
    high = min(high, bound)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def why_not_converted(sizes: ModelSizes) -> str | None:
    """Why `convert_to_mla` would refuse this model, as far as its config can tell; None where nothing is against it.

    What the attention computes cannot be told from shapes: a tiny model of the same config is tried.
    """
    model = sizes.model
    if getattr(sizes.decoder, "kv_lora_rank", None) is not None:
        return "the model caches latents already"
    if sizes.decoder is not sizes.config:
        return "the language model is inside another one: convert its text checkpoint alone"
    hosts = attention_modules(model)
    if not hosts:
        return (
            f"{type(model).__name__} has no attention with q_proj, k_proj, v_proj and o_proj (fused projections and "
            "other names are not known)"
        )
    if any(layer.kind != "DynamicLayer" or layer.shape is None for layer in sizes.layers):
        return "bytes of conversions are only counted for models whose layers all keep every key and value"
    turns = [buffer.numel() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    shape = sizes.layers[0].shape
    if not turns:
        return f"{type(model).__name__} has no rotary positions"
    if shape is not None and 2 * turns[0] != shape[1]:
        return f"{type(model).__name__} rotates only a part of its keys"
    if any(hasattr(module, "sinks") for _, module in hosts):
        return f"{type(model).__name__} attends with sinks"
    if model not in _TRIED:
        _TRIED[model] = _try_tiny(sizes)
    return _TRIED[model]


# By model: the survey and each line of a table ask again.
_TRIED: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def _try_tiny(sizes: ModelSizes) -> str | None:
    from ..compat.shrink import _shrink  # with the stubs of its checks, which nothing else here needs

    try:
        config = _shrink(copy.deepcopy(sizes.config))
        with torch.random.fork_rng(devices=[]):
            tiny = type(sizes.model)._from_config(config, dtype=torch.float32)
        inspect_hosts(tiny.eval())
    except NotImplementedError as error:
        return str(error)
    except Exception:  # a config that has no tiny form says nothing about conversions
        return None
    return None


def converted(sizes: ModelSizes, keep: float) -> Callable[[int, int], int] | None:
    """Bytes (of batch and tokens) after `convert_to_mla(kv_keep=keep)`, or None for models that it does not fit."""
    if why_not_converted(sizes) is not None:
        return None
    decoder = sizes.decoder
    plan = plan_mla(decoder, keep)
    config: Any = copy.deepcopy(decoder)
    entry = {"kv_lora_rank": plan.kv_lora_rank, "qk_rope_head_dim": plan.qk_rope_head_dim}
    config.mla = [{"layer_idx": index} | entry for index in range(len(sizes.layers))]
    cache = KVCache(config)
    return lambda batch, tokens: cache.expected_bytes(config, batch, tokens, sizes.dtype)
