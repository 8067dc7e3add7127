"""Which cache to take: of those that fit into memory, one whose measured fidelity is good enough."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..evaluate.measure import FACTS, config_facts
from ..specs import SIZES, CacheSpec, parse_spec
from .sizes import ModelSizes
from .table import Sized
from .units import show_bytes

CANDIDATES = (
    "kv",
    "paged:block_size=64",
    "float8",
    "rotated-4",
    "rotated-4-2",
    "rotated-3-2",
    "rotated-2",
    "snapkv:max_capacity_prompt=0.5",
    "snapkv:max_capacity_prompt=0.25",
    "snapkv:max_capacity_prompt=0.5+rotated-4",
    "offload:resident_length=1024",
    "rotated-4+offload:resident_length=1024",
)
MAX_FILE_BYTES = 100_000_000


@dataclass
class Candidate:
    """One cache, what it holds at the context asked for, and what was measured of it.

    Attributes:
        cache: the spec; `python` is the code to paste.
        lossless: nothing is lost, so nothing has to be measured (`kl` is 0).
        offloaded: older rows are in host memory: the last resort, since they have to be fetched.
        total_bytes, with_weights: of the cache in all tiers; on the device, with the weights.
        kl, top1: from `hf_kvcache.evaluate`; None where it was not measured.
        refused: why the model or the technique does not go with it.
    """

    cache: str
    lossless: bool
    offloaded: bool
    python: str = ""
    total_bytes: int = 0
    with_weights: int = 0
    fits: bool = False
    kl: float | None = None
    top1: float | None = None
    refused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def candidates(
    sizes: ModelSizes, specs: Sequence[str], context: int, batch: int, memory: int, weight_bits: float | None = None
) -> list[Candidate]:
    """Each spec with its bytes at this context and batch. Raises `ValueError` where the weights alone do not fit."""
    weights = round(sizes.parameters * (weight_bits or 8 * sizes.dtype.itemsize) / 8)
    if weights >= memory:
        raise ValueError(
            f"the weights alone take {show_bytes(weights)} of {show_bytes(memory)}: no cache fits beside them. Give "
            "more --gpu-memory, or quantize the weights and say so (--weight-bits 4)"
        )
    found = []
    for text in specs:
        spec = parse_spec(text)
        made = Candidate(str(spec), spec.lossless, spec.offload is not None)
        found.append(made)
        sized = Sized(sizes, spec)
        try:
            sized.cache(context)
        except (NotImplementedError, ValueError) as error:
            made.refused = " ".join(str(error).split())
            continue
        made.python = spec.python(context)
        made.total_bytes = sized.total(batch, context)
        made.with_weights = sized.device(batch, context) + weights
        made.fits = made.with_weights <= memory
        if spec.lossless:
            made.kl, made.top1 = 0.0, 1.0
    return found


def measured_as(text: str) -> str:
    """The spec whose fidelity is that of `text`: the same without offloading, which loses nothing."""
    spec = parse_spec(text)
    lossy = spec.offload is not None and spec.offload.arguments.get("top_pages") is not None
    parts = tuple(part for part in spec.parts if lossy or part.technique.kind not in ("offload", "pool"))
    return str(CacheSpec(parts)) if parts else "kv"


def fixed_sizes(text: str) -> list[str]:
    """Arguments of dropping policies that are numbers of tokens: what a short prompt shows of them says little."""
    policy = parse_spec(text).policy
    names = ("max_capacity_prompt", "heavy_size", "recent_size", "window_length", "decode_budget")
    return [k for k, v in policy.arguments.items() if k in SIZES and k in names and isinstance(v, int)]


def add_measurements(found: Sequence[Candidate], result: Mapping[str, Any]) -> None:
    """Enter `kl` and `top1` of an `evaluate` result."""
    by_spec = {str(parse_spec(entry["spec"])): entry for entry in result["caches"]}
    for candidate in found:
        entry = by_spec.get(measured_as(candidate.cache))
        if entry is not None and not candidate.lossless:
            candidate.kl, candidate.top1 = float(entry["kl"]), float(entry["top1"])


def read_measurements(path: str | Path) -> dict[str, Any]:
    """What `eval --json` or `recommend --json` wrote. Raises `ValueError` for anything else."""
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(content, dict) and "measurements" in content:
            content = content["measurements"]
        if not isinstance(content, dict) or not isinstance(content.get("caches"), list) or not content["caches"]:
            raise ValueError("it lists no caches")
        for entry in content["caches"]:
            if not isinstance(entry, dict) or not isinstance(entry.get("spec"), str):
                raise ValueError("a cache without a spec")
            parse_spec(entry["spec"])
            for name in ("kl", "top1"):
                if type(entry.get(name)) not in (int, float) or not 0 <= entry[name] < 1e9:
                    raise ValueError(f"{entry['spec']}: {name!r} is no number from 0 on")
    except (OSError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ValueError(
            f"{path} holds no measurements ({words}): give a file that `hf-kvcache eval --json` wrote"
        ) from error
    return content


def check_model(stored: Mapping[str, Any], path: str | Path, sizes: ModelSizes) -> str | None:
    """Raise `ValueError` where stored measurements are those of another model than `sizes`.

    Configs are compared (names, where older files hold no config). Returns the other name of a model with the same
    config, which may be a copy of this one or a finetune of it.
    """
    about = stored.get("model")
    name = about.get("name") if isinstance(about, dict) else None
    again = f"measure this one with `hf-kvcache eval --model {sizes.name} --json FILE`"
    if not isinstance(about, dict) or not isinstance(name, str):
        raise ValueError(f"{path} does not say which model was measured: {again}")
    same_name = name == sizes.name or os.path.realpath(name) == os.path.realpath(sizes.name)
    then, now = about.get("config"), config_facts(sizes.config)
    if isinstance(then, dict):
        differs = [fact for fact in FACTS if then.get(fact) != now.get(fact)]
        words = ", ".join(f"{fact} {then.get(fact)} and not {now.get(fact)}" for fact in differs[:2])
    else:
        differs, words = [] if same_name else ["name"], "another name"
    if differs:
        raise ValueError(f"{path} was measured on {name}, not on {sizes.name} ({words}): {again}")
    return None if same_name else name


def choose(found: Sequence[Candidate], max_kl: float | None, smallest: bool = False) -> Candidate:
    """The cache to take: on the device before offloaded, then the most faithful (or, with `smallest`, the smallest).

    `max_kl=None` asks for a lossless one. Raises `ValueError` saying what would help, where there is none.
    """
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        usable = [candidate for candidate in found if candidate.refused is None]
        if not usable:
            raise ValueError(f"no candidate goes with this model: {found[0].refused}")
        least = min(usable, key=lambda candidate: candidate.with_weights)
        raise ValueError(
            f"nothing fits: the smallest, {least.cache}, needs {show_bytes(least.with_weights)} with the weights. Give "
            "more --gpu-memory, a shorter --context, a smaller --batch or --weight-bits"
        )
    good = [c for c in fitting if c.lossless or (max_kl is not None and c.kl is not None and c.kl <= max_kl)]
    if not good:
        if max_kl is None:
            raise ValueError("no lossless cache fits: allow a little loss with --max-kl 0.02, or shorten --context")
        best = min((c for c in fitting if c.kl is not None), key=lambda c: c.kl or 0.0, default=None)
        words = (
            "none that fits was measured" if best is None else f"the best that fits, {best.cache}, has {best.kl:.2g}"
        )
        raise ValueError(f"no cache that fits stays within --max-kl {max_kl:g}: {words}")

    def order(candidate: Candidate) -> tuple[float, ...]:
        if smallest:
            return candidate.offloaded, candidate.with_weights, candidate.kl or 0.0
        return candidate.offloaded, candidate.kl or 0.0, candidate.with_weights

    return min(good, key=order)
