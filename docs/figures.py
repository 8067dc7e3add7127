"""Draw the pictures of the pages from the tables that stand in them: `python docs/figures.py` writes docs/img/*.png.

No figure is typed here, so a picture never says anything else than its table. Colours are those of Okabe and Ito, which
colour-blind readers tell apart; markers and line styles differ too, for print in grey.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-")


def table(page: str, *head: str) -> list[list[str]]:
    """The rows of the one table on `page` whose first cells of the head begin so."""
    found = []
    lines = (HERE / page).read_text(encoding="utf-8").splitlines()
    for at, line in enumerate(lines):
        cells = cells_of(line)
        # A table is a head, a rule, and rows.
        if len(cells) >= len(head) and at + 1 < len(lines) and re.match(r"^\| *-+", lines[at + 1]):
            if all(cell.startswith(word) for cell, word in zip(cells, head, strict=False)):
                rows = []
                for row in lines[at + 2 :]:
                    if not row.startswith("|"):
                        break
                    rows.append(cells_of(row))
                found.append(rows)
    if len(found) != 1:
        raise ValueError(f"{page} has {len(found)} tables whose head begins with {head}, expected one")
    return found[0]


def cells_of(line: str) -> list[str]:
    return [cell.strip().replace("*", "") for cell in line.strip("|").split("|")] if line.startswith("|") else []


def number(text: str) -> float:
    """The first number in a cell."""
    found = re.search(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)
    if found is None:
        raise ValueError(f"no number in {text!r}")
    return float(found[0].replace(",", ""))


def row_of(rows: list[list[str]], start: str) -> list[str]:
    found = [row for row in rows if row[0].startswith(start)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows begin with {start!r}, expected one")
    return found[0]


def curve(axes: Axes, index: int, x: Sequence[float], y: Sequence[float], label: str, **style: Any) -> None:
    style = {"linestyle": LINES[index], "linewidth": 1.6, "markersize": 6} | style
    axes.plot(x, y, color=COLOURS[index], marker=MARKERS[index], label=label, **style)


def finish(axes: Axes, x: str, y: str, legend: str | None = "best") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend is not None:
        axes.legend(loc=legend, frameon=False, fontsize=8)


def codecs(figure: Figure) -> None:
    """KL over bits: the presets, KIVI as in the paper, and bits allotted by layer."""
    axes = figure.add_subplot()
    rows = table("measured.md", "codec", "bits", "KL topics")
    points = [(row[0], number(row[1]), (number(row[2]) + number(row[3])) / 2) for row in rows]
    groups: list[tuple[str, Callable[[str], bool]]] = [
        ("Rotated", lambda name: name.startswith('`"rotated')),
        ("KIVI, 4 exact first tokens", lambda name: name.startswith('`"kivi')),
        ("KIVI, no exact first tokens", lambda name: "QuantizedKIVICache" in name),
        ("Float8", lambda name: name.startswith('`"float8')),
    ]
    for index, (label, belongs) in enumerate(groups):
        mine = sorted((bits, kl) for name, bits, kl in points if belongs(name))
        curve(axes, index, *zip(*mine, strict=True), label)
    for name, bits, kl in points:
        short = name.split('"')[1] if '"' in name else None
        if short is not None:
            left = {"kivi-2": (-6, 2), "kivi-4": (-6, -9), "kivi-8": (-6, -9), "rotated-4": (-6, -9)}.get(short)
            at, side = ((5, 6), "left") if left is None else (left, "right")
            axes.annotate(short, (bits, kl), xytext=at, textcoords="offset points", fontsize=7, color="0.25", ha=side)
    allotted = table("quantization.md", "", "bits", "KL topics")
    mine = sorted(
        (number(row[1]), (number(row[2]) + number(row[3])) / 2) for row in allotted if row[0].startswith("cal")
    )
    curve(axes, 4, *zip(*mine, strict=True), "Rotated, bits by layer (two windows)")
    axes.set_yscale("log")
    finish(axes, "bits of an element (codes, scales, zeros)", "KL from the full cache, nats")


def selection(figure: Figure) -> None:
    """KL over the share of rows kept, and planted codes found."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    fidelity = table("measured.md", "cache", "50%: KL, top-1", "25%: KL, top-1")
    recall = table("measured.md", "cache", "50% of the rows", "25%")
    series = [
        ("`SlidingWindowCache`", "window + 4 sinks", "`SlidingWindowCache`"),
        ("`HeavyHitterCache`, half", "H2O, sums", None),
        ('the same with `score="mean"`', "H2O, mean", "`HeavyHitterCache`, either"),
        ("`SnapKVCache`, the paper's", "SnapKV, the paper's", "`SnapKVCache`, the paper's"),
        ("`SnapKVCache(window_size=128", "SnapKV, maxpool 13", "`SnapKVCache(window_size=128"),
        ("`SnapKVCache`, ahead", "SnapKV, ahead", "`SnapKVCache`, ahead"),
        ("the same with `adaptive_heads", "ahead, adaptive heads", "the same with `adaptive_heads"),
    ]
    bars: list[tuple[int, str, float, float]] = []
    for index, (start, label, found) in enumerate(series):
        row = row_of(fidelity, start)
        curve(left, index, [50, 25, 12.5], [number(cell) for cell in row[1:4]], label)
        if found is not None:
            cells = row_of(recall, found)
            name = "H2O" if label.startswith("H2O") else label
            bars.append((index, name, number(cells[1]), number(cells[2])))
    left.set_xscale("log")
    left.set_xticks([12.5, 25, 50], ["12.5%", "25%", "50%"])
    left.minorticks_off()
    left.set_yscale("log")
    finish(left, "share of the rows kept", "KL from the full cache, nats", "lower left")
    for at, (index, _, half, quarter) in enumerate(reversed(bars)):
        right.barh(at + 0.19, half, 0.36, color=COLOURS[index], alpha=0.45)
        right.barh(at - 0.19, quarter, 0.36, color=COLOURS[index])
        right.text(half + 0.3, at + 0.19, f"{half:.0f} at 50%", va="center", fontsize=7)
        right.text(quarter + 0.3, at - 0.19, f"{quarter:.0f} at 25%", va="center", fontsize=7)
    right.set_yticks(range(len(bars)), [name for _, name, _, _ in reversed(bars)], fontsize=8)
    right.set_xlim(0, 24)
    right.set_xticks([0, 6, 12, 18])
    finish(right, "planted codes found, of 18", "", None)


def top_pages(figure: Figure) -> None:
    axes = figure.add_subplot()
    rows = table("offload.md", "page", "share of the pages", "rows read")
    for index, page in enumerate(("16", "64")):
        mine = [row for row in rows if row[0] == page and row[3]]
        x, y = [number(row[2]) for row in mine], [number(row[3]) for row in mine]
        curve(axes, index, x, y, f"pages of {page} tokens")
        for row, a, b in zip(mine, x, y, strict=True):
            below = page == "16"
            axes.annotate(
                f"{row[5]} found",
                (a, b),
                xytext=(4, -11 if below else 6),
                textcoords="offset points",
                fontsize=7.5,
                color=COLOURS[index],
                ha="right" if below else "left",
            )
    axes.set_yscale("log")
    axes.margins(x=0.18, y=0.12)
    finish(axes, "rows read, % of all", "KL from the full cache, nats")


def beams(figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    rows = table("paging.md", "cache", "reorder at 512")
    for index, row in enumerate(rows):
        values = [number(cell) for cell in (*row[1:4], *row[5:8])]
        label = row[0].replace("`", "")
        curve(left, index, [512, 1024, 4096], values[:3], label)
        curve(right, index, [512, 1024, 4096], values[3:], label)
    for axes, what in ((left, "a reorder, ms"), (right, "a step, ms")):
        axes.set_xscale("log", base=2)
        axes.set_xticks([512, 1024, 4096], ["512", "1,024", "4,096"])
        finish(axes, "tokens", what)
    left.set_yscale("log")
    right.set_ylim(bottom=0)


def sharing(figure: Figure) -> None:
    axes = figure.add_subplot()
    rows = table("cross_layer.md", "layers that follow", "KVSharer")
    labels = ('find_sharing(method="kl")', "KVSharer's order", "adjacent pairs, last layers", "adjacent pairs, spread")
    for index, (label, column) in enumerate(zip(labels, (4, 1, 2, 3), strict=True)):
        mine = [(number(row[0]), number(row[column])) for row in rows if row[column] != "–" and number(row[0]) < 10]
        curve(axes, index, *zip(*mine, strict=True), label)
    text = (HERE / "cross_layer.md").read_text(encoding="utf-8")
    found = re.search(r"Unshared perplexity ([\d.]+)", text)
    if found is None:
        raise ValueError("cross_layer.md does not say the unshared perplexity")
    axes.axhline(float(found[1].rstrip(".")), color="0.4", linewidth=1, linestyle=(0, (1, 2)), label="unshared")
    axes.set_yscale("log")
    axes.set_xticks([3, 6, 9])
    finish(axes, "layers that follow, of 30", "perplexity")


def mla(figure: Figure) -> None:
    axes = figure.add_subplot()
    rows = table("mla.md", "", "attention: stock", "absorbed")
    names = ("stock: expands the context", "absorbed", "absorbed, 4-bit latents")
    for at, row in enumerate(rows):
        for index, name in enumerate(names):
            value = number(row[1 + index])
            axes.bar(at + (index - 1) * 0.27, value, 0.25, color=COLOURS[index], label=name if at == 0 else None)
            axes.text(at + (index - 1) * 0.27, value * 1.06, f"{value:g}", ha="center", fontsize=7.5)
    dtypes = [row[0] if row[0].endswith("tokens") else f"{row[0]} tokens" for row in rows]
    axes.set_xticks(range(len(rows)), [name.replace(", ", "\n", 1) for name in dtypes])
    axes.set_yscale("log")
    axes.set_ylim(1, 600)
    finish(axes, "", "attention of one layer, ms a token", "upper right")


def conversion(figure: Figure) -> None:
    axes = figure.add_subplot()
    rows = table("mla_conversion.md", "bytes kept", "this library")
    shares = [number(row[0]) for row in rows]
    for index, (column, label) in enumerate(((1, "convert_to_mla"), (2, "TransMLA-style baseline"))):
        curve(axes, index, shares, [number(row[column]) for row in rows], label)
    axes.axhline(1, color="0.4", linewidth=1, linestyle=(0, (1, 2)))
    axes.set_yscale("log")
    axes.set_yticks([1, 1.25, 1.5, 2, 3, 5, 10], ["1", "1.25", "1.5", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_xticks(shares, [f"{share:g}%" for share in shares])
    finish(axes, "bytes kept", "perplexity, times the original's")


# name -> what draws it, and its size in inches
FIGURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "codecs": (codecs, (7.2, 4.2)),
    "selection": (selection, (8.6, 4.0)),
    "top_pages": (top_pages, (7.2, 3.9)),
    "beams": (beams, (8.4, 3.6)),
    "sharing": (sharing, (7.2, 3.8)),
    "mla": (mla, (7.2, 3.8)),
    "conversion": (conversion, (7.2, 3.6)),
}


def draw(name: str, folder: Path) -> Path:
    paint, size = FIGURES[name]
    figure = Figure(figsize=size, dpi=105, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    paint(figure)
    path = folder / f"{name}.png"
    figure.savefig(path, metadata={"Software": None})
    return path


def main() -> None:
    folder = HERE / "img"
    folder.mkdir(exist_ok=True)
    for name in FIGURES:
        print(draw(name, folder).relative_to(HERE.parent))


if __name__ == "__main__":
    main()
