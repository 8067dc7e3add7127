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
    host = [row.host_bytes / unit for row in rows]
    axes.barh(places, device, color=DEVICE, label="on the device", height=0.7)
    if any(host):
        axes.barh(
            places, host, left=device, color=HOST, hatch="///", edgecolor="white", label="in host memory", height=0.7
        )
    longest = max(d + h for d, h in zip(device, host, strict=True))
    labels = []
    for place, row in enumerate(rows):
        words = show_bytes(row.bytes_total)
        if row.host_bytes:
            words = f"{show_bytes(row.device_bytes)} and {show_bytes(row.host_bytes)} in host memory"
        if row.fits is not None:
            words += ", fits" if row.fits else ", does not fit"
        end = device[place] + host[place]
        label = axes.annotate(words, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        label.set_in_layout(False)
        # The line where the device is full would run through the words.
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        labels.append((end, label))
    right = longest * 1.05
    left = ""
    if found.memory is not None:
        room = found.memory - found.weights_bytes
        left = f", {show_bytes(max(0, room))} of {show_bytes(found.memory)} left beside them"
        if 0 < room / unit < 2 * longest:
            axes.axvline(room / unit, color=LIMIT, linestyle="--", linewidth=1.5, label="left beside the weights")
            right = max(right, 1.05 * room / unit)
    axes.set_xlim(0, right)
    axes.set_yticks(list(places), [row.cache for row in rows], fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes of the cache ({'GB' if unit == 1e9 else 'MB'})")
    axes.set_title(
        f"{Path(found.model).name or found.model}: {found.batch} x {found.context:,} tokens, {found.dtype}, weights "
        f"{show_bytes(found.weights_bytes)}{left}",
        fontsize=10,
    )
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    # Labels stand to the right of their bars and are as wide as their words: the axis goes on until all have room.
    figure.draw_without_rendering()
    wide = axes.get_window_extent().width
    for end, label in labels:
        words_wide = label.get_window_extent().width + 0.02 * wide
        right = max(right, end * wide / max(0.1 * wide, wide - words_wide))
    axes.set_xlim(0, right)
    figure.savefig(path, format="png")
