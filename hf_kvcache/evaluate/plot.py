"""A picture of what `evaluate` measured: fidelity over size, and which caches no other one beats in both."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..specs import parse_spec
from .report import windows_of

X_AXES = {
    "bits": ("bits_per_element", "bits per element of the prompt's keys and values"),
    "bytes": ("bytes_at_end", "bytes held at the end, as a share of the full cache's"),
}
# Okabe and Ito's colours, apart for every kind of colour vision; markers and dashes tell them apart in print too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
# A logarithmic axis has no place for zero; below this, KL is rounding.
LEAST_KL = 1e-7


def require() -> None:
    """Raise `ImportError` where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plots need matplotlib: pip install 'hf-kvcache[eval]'")


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other one beats in x and y both (smaller is better), from left to right."""
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not found or points[index][1] < points[found[-1]][1]:
            found.append(index)
    return found


def pareto(result: Mapping[str, Any], path: str | Path, x: str = "bits") -> None:
    """Write a PNG of KL over `x` (`"bits"` or `"bytes"`), a labelled point for each cache, the lower left front drawn.

    Raises `ImportError` where matplotlib is not installed.
    """
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    name, axis = X_AXES[x]
    specs = [cache["spec"] for cache in result["caches"]]
    points = [(cache[name], max(cache["kl"], LEAST_KL)) for cache in result["caches"]]
    best = front(points)
    # No pyplot: it would choose a backend for the whole process.
    figure = Figure(figsize=(11.5, 6.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    kinds = sorted({_kind(spec) for spec in specs})
    axes.plot(*zip(*(points[i] for i in best), strict=True), color="0.6", linewidth=1.2, zorder=1, label="front")
    rank = {index: place for place, index in enumerate(sorted(range(len(points)), key=lambda i: points[i]))}
    # Specs are long and points lie close: each has its number, and the legend says what that stands for.
    for number, (spec, point) in enumerate(zip(specs, points, strict=True), start=1):
        kind = kinds.index(_kind(spec))
        colour, marker = COLOURS[kind % len(COLOURS)], MARKERS[kind % len(MARKERS)]
        # What lies on the floor of the axis lost nothing, or less than rounding.
        label = f"{number}  {spec}" + (" (KL 0)" if result["caches"][number - 1]["kl"] <= LEAST_KL else "")
        axes.scatter(*point, s=80, color=colour, marker=marker, edgecolors="none", label=label, zorder=3)
        # In turn above and below, since points lie close.
        place = (6, -10) if rank[number - 1] % 2 else (6, 4)
        axes.annotate(f"{number}", point, xytext=place, textcoords="offset points", fontsize=8, zorder=4)
    axes.margins(0.06)
    axes.set_xlabel(axis)
    axes.set_ylabel("KL from the full cache (nats per token)")
    asked, model = result["arguments"], result["model"]
    axes.set_title(
        f"{Path(model['name']).name}, {model['dtype']}: prompts of {asked['prompt']:,} tokens, "
        f"{asked['tokens']} fed one at a time,\n{windows_of(result)}",
        fontsize=10,
    )
    axes.grid(True, which="major", color="0.92")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, format="png")


def _kind(spec: str) -> str:
    """The techniques of a spec without their arguments: points of one kind share a colour."""
    try:
        return "+".join(part.name for part in parse_spec(spec).parts)
    except ValueError:  # a name of the caller's own
        return spec
