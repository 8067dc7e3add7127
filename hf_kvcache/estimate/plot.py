"""A picture of an estimate: bytes of every cache beside what the device has left for it."""

from __future__ import annotations

from pathlib import Path

from ..evaluate.plot import require
from .table import Estimate
from .units import show_bytes

# Dark to light in print, and apart for every kind of colour vision (Okabe and Ito).
DEVICE, HOST, LIMIT = "#0072B2", "#E69F00", "#D55E00"


def bars(found: Estimate, path: str | Path) -> None:
    """Write a PNG: one bar for each cache, what lies in host memory hatched, a line where the device is full.

    Raises `ImportError` where matplotlib is not installed.
    """
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = found.rows
    unit = 1e9 if max(row.bytes_total for row in rows) >= 1e9 else 1e6
    figure = Figure(figsize=(10, 1.5 + 0.32 * len(rows)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(rows))
    device = [row.device_bytes / unit for row in rows]
    host = [max(0, row.bytes_total - row.device_bytes) / unit for row in rows]
    axes.barh(places, device, color=DEVICE, label="on the device", height=0.7)
    if any(host):
        axes.barh(
            places, host, left=device, color=HOST, hatch="///", edgecolor="white", label="in host memory", height=0.7
        )
    longest = max(d + h for d, h in zip(device, host, strict=True))
    for place, row in enumerate(rows):
        words = show_bytes(row.bytes_total)
        if row.fits is not None:
            words += ", fits" if row.fits else ", does not fit"
        end = device[place] + host[place]
        axes.annotate(words, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    right = longest * 1.28
    if found.memory is not None:
        room = (found.memory - found.weights_bytes) / unit
        if room > 0:
            axes.axvline(
                room, color=LIMIT, linestyle="--", linewidth=1.5, label=f"left beside the weights: {_left(found)}"
            )
            right = max(right, room * 1.05) if room < 2 * longest else right
    axes.set_xlim(0, right)
    axes.set_yticks(list(places), [row.cache for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes of the cache ({'GB' if unit == 1e9 else 'MB'})")
    axes.set_title(
        f"{Path(found.model).name or found.model}: {found.batch} x {found.context:,} tokens, {found.dtype}, weights "
        f"{show_bytes(found.weights_bytes)}",
        fontsize=10,
    )
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="lower right", framealpha=0.95)
    figure.savefig(path, format="png")


def _left(found: Estimate) -> str:
    assert found.memory is not None
    return f"{show_bytes(found.memory - found.weights_bytes)} of {show_bytes(found.memory)}"
