"""Pictures of caches at work: what stays, memory over a generation, decode time over the context.

Lines differ in colour, dashes and markers, and the heat map runs from white to dark, so that all of them can be read in
print and with every kind of colour vision. Everything here needs matplotlib, which is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

from .bench.decode import held_bytes
from .cache import _NOT_OURS, KVCache, _native_nbytes
from .evaluate.plot import COLOURS, DASHES, MARKERS, require
from .layer import KVLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 480  # of the heat map: more positions than that share a column
MEGABYTE = 1e6


# ---------------------------------------------------------------------- which tokens stay


def plot_kept(cache: KVCache, path: str | Path, batch_row: int = 0) -> None:
    """Write a PNG of the positions that one batch row still holds: a line for each KV head, layer under layer.

    A column stands for one position, or where there are more than 480 for several, and shows the share of them that is
    held. The panel above is the mean over all heads. Padding is grey. Layers that are left to transformers are not
    drawn; those that share rows are drawn with the rows they read.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: an empty cache, or a batch row that it does not have.
    """
    require()
    layers = [index for index in range(len(cache.layers)) if isinstance(cache._holder(index), KVLayer)]
    seen = cache._seen()
    if not layers and cache.get_seq_length():
        raise ValueError(f"there is nothing to draw: {_NOT_OURS}")
    if not layers or not seen:
        raise ValueError("the cache is empty: run a prompt through it first")
    batch = cache.kept_positions(layers[0]).shape[0]
    if not 0 <= batch_row < batch:
        raise ValueError(f"`batch_row` must be 0 to {batch - 1}, got {batch_row}")
    columns = min(seen, COLUMNS)
    edges = torch.linspace(0, seen, columns + 1).round().long()
    shares = [_share_of(cache.kept_positions(index)[batch_row], edges) for index in layers]  # [H, columns] each
    image = torch.cat(shares)
    padding = next((p for p in (layer.padding for layer in cache.kv_layers) if p is not None), None)
    pad = 0 if padding is None else int(padding[batch_row])
    image[:, edges[1:] <= pad] = float("nan")

    rows = image.shape[0]
    figure = _figure(10, min(max(3.6, 1.9 + 0.075 * rows), 11))
    heights = [1, min(max(2.0, 0.06 * rows), 9)]
    above, axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    from matplotlib import colormaps

    colours = colormaps["Blues"].with_extremes(bad="0.75")
    mesh = axes.pcolormesh(edges.numpy(), range(rows + 1), image.numpy(), cmap=colours, vmin=0, vmax=1)
    starts = [0]
    for share in shares:
        starts.append(starts[-1] + share.shape[0])
    for start in starts[1:-1]:
        axes.axhline(start, color="0.6", linewidth=0.4)
    every = max(1, len(layers) // 16)
    middles = [(a + b) / 2 for a, b in zip(starts, starts[1:], strict=False)]
    axes.set_yticks(middles[::every], [str(index) for index in layers[::every]])
    axes.set_ylim(rows, 0)
    axes.set_ylabel("layer, line by KV head")
    axes.set_xlabel("position in the sequence (tokens)")
    axes.set_xlim(0, seen)
    legend = figure.colorbar(mesh, ax=axes, pad=0.01, aspect=max(10, 5 * heights[1]))
    legend.set_label("held" if columns == seen else f"share held (a column is {seen / columns:.1f} positions)")
    above.stairs(image.nanmean(0).nan_to_num().numpy(), edges.numpy(), fill=True, color=COLOURS[1])
    above.set_ylim(0, 1.05)
    above.set_ylabel("share of\nheads")
    _grid(above)
    kept = [(cache.kept_positions(index)[batch_row] >= 0).sum(-1).double().mean() for index in layers]
    mean = float(sum(kept)) / len(layers)
    others = len(cache.layers) - len(layers)
    left = f" ({others} layers left to transformers not shown)" if others else ""
    held = f"{mean:,.0f} of {seen - pad:,} tokens held per KV head ({mean / (seen - pad):.0%})"
    above.set_title(f"{type(cache).__name__}: {held}{left}", fontsize=10)
    figure.savefig(path, format="png")


def _share_of(positions: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Share of the positions between two edges that are held: `[H, len(edges) - 1]` from `[H, kept]`, -1 for none."""
    seen = int(edges[-1])
    index = torch.where(positions < 0, seen, positions.cpu()).long()
    held = torch.zeros(positions.shape[0], seen + 1).scatter_(1, index.cpu(), 1.0)[:, :seen]
    sums = torch.cat([torch.zeros(held.shape[0], 1), held.double().cumsum(1)], dim=1)
    return ((sums[:, edges[1:]] - sums[:, edges[:-1]]) / edges.diff()).float()


# ---------------------------------------------------------------------- memory over a generation


@dataclass(frozen=True)
class MemoryRow:
    """What a cache held after one step.

    Attributes:
        seen: tokens ever given.
        kept: rows per KV head, of the layer that holds most.
        nbytes: bytes held, slack and metadata included, in every tier.
        device_bytes: those of them that are on the compute device.
        full_bytes: bytes of the keys and values of a `DynamicCache` at the same point.
    """

    seen: int
    kept: int
    nbytes: int
    device_bytes: int
    full_bytes: int


class MemoryRecorder(StoppingCriteria):
    """Records the bytes of a cache after each step, and stops nothing.

        recorder = MemoryRecorder(cache)
        model.generate(**inputs, past_key_values=cache, stopping_criteria=[recorder])
        plot_memory({"SnapKV": recorder}, "memory.png")

    In a loop of your own call `record()`. `rows` are what was recorded. Works for transformers' own caches too.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.rows: list[MemoryRow] = []

    def record(self) -> MemoryRow:
        """Take down what the cache holds now."""
        cache = self.cache
        nbytes = held_bytes(cache)
        device = cache.nbytes_by_tier()["device"] if isinstance(cache, KVCache) else nbytes
        self.rows.append(MemoryRow(int(cache.get_seq_length()), kept_rows(cache), nbytes, device, full_bytes(cache)))
        return self.rows[-1]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.record()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def kept_rows(cache: Any) -> int:
    """Rows per KV head of the layer that holds most of them."""
    if isinstance(cache, KVCache):
        return max(cache.kept_length(layer) for layer in range(len(cache.layers)))
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return max((key.shape[-2] for key in keys if key is not None and key.ndim == 4), default=0)


def full_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a `DynamicCache` would hold for the tokens that `cache` was given."""
    total = 0
    for index, layer in enumerate(cache.layers):
        holder = cache._holder(index) if isinstance(cache, KVCache) else layer
        if not isinstance(holder, KVLayer):
            total += _native_nbytes(holder)
        elif holder.get_seq_length():
            batch, heads, key, value = holder.segments.shape
            window = holder.sliding_window or holder.chunk_size or holder.get_seq_length()
            total += min(holder.get_seq_length(), window) * batch * heads * (key + value) * holder.element_size
    return total


def plot_memory(recorded: Mapping[str, MemoryRecorder | Sequence[MemoryRow]], path: str | Path) -> None:
    """Write a PNG of bytes over tokens: a line for each name, and what the full cache would hold.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing was recorded.
    """
    require()
    series = {name: list(r.rows if isinstance(r, MemoryRecorder) else r) for name, r in recorded.items()}
    if not series or not all(series.values()):
        raise ValueError("nothing was recorded: pass `stopping_criteria=[MemoryRecorder(cache)]` to `generate`")
    figure = _figure(9.5, 5)
    axes = figure.add_subplot()
    full = {row.seen: row.full_bytes for rows in series.values() for row in rows}
    tokens = sorted(full)
    axes.plot(
        tokens,
        [full[n] / MEGABYTE for n in tokens],
        color="0.45",
        linewidth=3,
        linestyle=(0, (1, 1)),
        label=f"full cache: {full[tokens[-1]] / MEGABYTE:,.2f} MB",
    )
    for number, (name, rows) in enumerate(series.items(), start=1):
        seen = [row.seen for row in rows]
        style = _style(number, len(rows)) | dict(drawstyle="steps-post")
        axes.plot(seen, [row.nbytes / MEGABYTE for row in rows], label=f"{name}: {_end(rows[-1].nbytes)}", **style)
        if any(row.device_bytes != row.nbytes for row in rows):
            held = [row.device_bytes / MEGABYTE for row in rows]
            label = f"{name}, on the device: {_end(rows[-1].device_bytes)}"
            axes.plot(seen, held, label=label, **style | dict(linestyle=":", markerfacecolor="white"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens given to the cache (prompt and generated)")
    axes.set_ylabel("bytes held (MB)")
    axes.set_title("Memory of the cache; the legend has the bytes at the end", fontsize=10)
    _grid(axes)
    _thousands(axes.xaxis)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, format="png")


def _end(nbytes: int) -> str:
    return f"{nbytes / MEGABYTE:,.2f} MB"


# ---------------------------------------------------------------------- decode time over the context


def plot_decode_time(rows: Iterable[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Write a PNG of milliseconds of a decoding step over the context, a line for each cache.

    Args:
        rows: one mapping for each cache and context, with `"cache"` (a name), `"tokens"` and `"ms"`.
        title: what was measured on what.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no rows.
    """
    require()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault(str(row["cache"]), []).append((int(row["tokens"]), float(row["ms"])))
    if not lines:
        raise ValueError("there is nothing to draw: `rows` is empty")
    figure = _figure(9.5, 5)
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), label=name, **_style(number, 1))
    contexts = sorted({tokens for points in lines.values() for tokens, _ in points})
    if len(contexts) > 1 and contexts[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts)
        axes.minorticks_off()
    _thousands(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("time of a decoding step (ms)")
    axes.set_title(title, fontsize=10)
    _grid(axes)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, format="png")


# ---------------------------------------------------------------------- what they share


def _figure(width: float, height: float) -> Figure:
    """A figure of so many inches. No pyplot: it would choose a backend for the whole process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(number: int, points: int) -> dict[str, Any]:
    """Colour, dashes and marker of line `number`; of many points every so manieth has a marker."""
    every = (number * max(1, points // 40), max(1, points // 8)) if points > 16 else 1
    return dict(
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
        linestyle=DASHES[number % len(DASHES)],
        linewidth=1.8,
        markersize=6,
        markevery=every,
    )


def _grid(axes: Any) -> None:
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)


def _thousands(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


__all__ = ["MemoryRecorder", "MemoryRow", "full_bytes", "held_bytes", "plot_decode_time", "plot_kept", "plot_memory"]
