"""A picture of decode times: milliseconds of a step over the context, a line for each cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..evaluate.plot import require

# Okabe and Ito's colours; dashes and markers tell lines apart where colour does not.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS, DASHES = "osD^vPX", ("-", "--", "-.", ":")


def lines(result: Mapping[str, Any], path: str | Path) -> None:
    """Write a PNG of what `decode_times` returned. Raises `ImportError` where matplotlib is not installed."""
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 5.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [row["cache"] for row in result["contexts"][0]["rows"]]
    for number, name in enumerate(names):
        points = [
            (entry["tokens"], row["ms"])
            for entry in result["contexts"]
            for row in entry["rows"]
            if row["cache"] == name
        ]
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number // len(COLOURS) % len(DASHES)] if number >= len(COLOURS) else DASHES[number % 2],
            linewidth=1.8,
            markersize=6,
            label=name,
        )
    contexts = [entry["tokens"] for entry in result["contexts"]]
    if len(contexts) > 1:
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts)
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("milliseconds of a decoding step (median)")
    name = Path(result["model"]).name
    axes.set_title(
        f"{name}, {result['dtype']}, {result['device']}, {result['threads']} thread(s), {result['steps']} steps, "
        "caches interleaved",
        fontsize=10,
    )
    axes.grid(True, color="0.9")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, format="png")
