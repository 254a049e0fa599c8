"""The report's plots, as PNG data URIs; matplotlib is imported only when one is drawn.

Each is drawn as wide as a page or as wide as a telephone; what it says in words is in captions.py.
"""

from __future__ import annotations

import base64
import io
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mmqc.report.tables import MODALITIES, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"visual": "#d9772b", "text": "#2f6db5"}
# one for each report; none of them means a modality
SERIES = ("#9aa0a8", "#2a9d6e", "#7a4fb5", "#c2478a", "#b8902a", "#4a5568")
TOWER_COLOURS = {"vision": "#7a4fb5", "projector": "#b8902a", "language": "#2a9d6e"}
INK, MUTED, RULE = "#1d2430", "#6b7280", "#e3e6ea"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 7.5,
    "grid.color": RULE,
    "legend.frameon": False,
}
WIDE, NARROW = 11.2, 4.6  # inches; 95 and 80 pixels of the page each
LABELS = 5.2  # of layers, an inch: more would overlap
FEW = 8  # so few layers are drawn as wide as if they were 8


@contextmanager
def figure(height: float, rows: int = 1, columns: int = 1, *, width: float, **options: Any) -> Iterator[tuple[Figure, list[Any]]]:
    """A figure of ``rows`` axes above each other, or ``columns`` side by side, without pyplot's global state."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError(
            "an HTML report needs matplotlib for its plots: pip install 'mmqc[report]', or save to a .json or .txt file"
        ) from e
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(fig)
        yield fig, list(fig.subplots(rows, columns, squeeze=False, **options).flat)


def png(fig: Figure) -> str:
    """The figure as a data URI."""
    buffer = io.BytesIO()
    fig.savefig(buffer, dpi=150, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def short(fqn: str) -> str:
    """E.g. model.language_model.layers.3.mlp.down_proj -> 3 down_proj."""
    number = re.findall(r"\.(\d+)\.", fqn)
    name = fqn.rsplit(".", 1)[-1] if not re.search(r"\.\d+$", fqn) else ".".join(fqn.rsplit(".", 2)[-2:])
    return f"{number[-1]} {name}" if number else name


def block(layer: Row) -> tuple[str, str]:
    """The tower and the number of the block that a layer is in; no number outside of blocks."""
    number = re.search(r"\.(\d+)\.", layer["fqn"])
    return layer["tower"], number[1] if number else ""


def distinct_inputs(layers: Sequence[Row]) -> list[Row]:
    """One layer for each input: q, k and v read the same tensor, so only the first is drawn."""
    kept: list[Row] = []
    for layer in layers:
        if not kept or layer["ranges"] != kept[-1]["ranges"]:
            kept.append(layer)
    return kept


def ranges_plot(reports: Mapping[str, Row], towers: Sequence[str], *, width: float = WIDE) -> str | None:
    """Smallest and largest input of every layer in ``towers``, or block if there are many, visual rows against text rows.

    None without data.
    """
    panels = {
        name: kept if len(kept) <= width * LABELS else _widest_of_blocks(kept)
        for name, report in reports.items()
        if (kept := distinct_inputs([x for x in report["layers"] if x["tower"] in towers and x["ranges"]]))
    }
    if not panels:
        return None
    widest = max(abs(v) for kept in panels.values() for layer in kept for r in layer["ranges"].values() for v in r)
    with figure(0.6 + 2.35 * len(panels), len(panels), width=width) as (fig, axes):
        for axis, (name, layers) in zip(axes, panels.items(), strict=True):
            _range_bars(axis, layers)
            axis.set_title(name if len(reports) > 1 else "")
            axis.set_yscale("symlog", linthresh=1, linscale=0.7)
            axis.set_ylim(-1.3 * widest, 1.3 * widest)
            _layer_axis(axis, layers, width)
        _legend(fig, axes[0])
        fig.supylabel("input values", color=MUTED, fontsize=9)
        return png(fig)


def _widest_of_blocks(layers: Sequence[Row]) -> list[Row]:
    """A line a block: the first layer's, with the smallest and the largest of all inputs."""
    lines: list[Row] = []
    for _, run in groupby(layers, key=block):
        own = list(run)
        ends = {m: [x["ranges"][m] for x in own if m in x["ranges"]] for m in MODALITIES}
        ranges = {m: (min(low for low, _ in found), max(high for _, high in found)) for m, found in ends.items() if found}
        lines.append({**own[0], "ranges": ranges, "block": True})
    return lines


def _legend(fig: Any, axis: Any) -> None:
    """Above the panels, where no value can be under it."""
    handles, names = axis.get_legend_handles_labels()
    fig.legend(handles, names, ncols=2 if fig.get_figwidth() <= NARROW else 4, loc="outside upper right", markerscale=2)


def _range_bars(axis: Any, layers: Sequence[Row]) -> None:
    axis.axhline(0, color=MUTED, linewidth=0.6, zorder=3)
    axis.grid(axis="y", linewidth=0.6)
    axis.set_axisbelow(True)
    present = [m for m in MODALITIES if any(m in layer["ranges"] for layer in layers)]
    for offset, modality in zip((-0.2, 0.2) if len(present) > 1 else (0.0,), present, strict=True):
        at = [i for i, layer in enumerate(layers) if modality in layer["ranges"]]
        low = [layers[i]["ranges"][modality][0] for i in at]
        height = [layers[i]["ranges"][modality][1] - layers[i]["ranges"][modality][0] for i in at]
        axis.bar([i + offset for i in at], height, 0.36, low, color=COLOURS[modality], label=f"{modality} tokens")


def _layer_axis(axis: Any, layers: Sequence[Row], width: float) -> None:
    """Names below, as many as there is room for: every layer's, else the numbers of blocks; a line between towers."""
    most, n = int(width * LABELS), len(layers)
    beside = max(0.7, (FEW - n) / 2)
    axis.set_xlim(-beside, n - 1 + beside)
    axis.tick_params(axis="x", length=0, pad=1)
    if n <= most and not any(layer.get("block") for layer in layers):
        axis.set_xticks(range(n), [short(layer["fqn"]) for layer in layers], rotation=60, ha="right")
    else:
        ticks: list[tuple[int, str]] = []
        for i, run in ((next(run)[0], key) for key, run in groupby(enumerate(layers), key=lambda pair: block(pair[1]))):
            if run[1] and (not ticks or i - ticks[-1][0] >= n / most):
                ticks.append((i, run[1]))
        axis.set_xticks([i for i, _ in ticks], [number for _, number in ticks])
        axis.set_xlabel("block")
    towers = [layer["tower"] for layer in layers]
    for i in range(1, n):
        if towers[i] != towers[i - 1]:
            axis.axvline(i - 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))


def sqnr_plot(reports: Mapping[str, Row], *, width: float = WIDE) -> str | None:
    """SQNR of every layer's output, one panel for each modality, one colour for each report; None without data."""
    order = list({layer["fqn"]: layer for report in reports.values() for layer in report["layers"] if layer["sqnr"]}.values())
    towers = {tower: i for i, tower in enumerate(dict.fromkeys(layer["tower"] for layer in order))}
    modalities = [m for m in MODALITIES if any(m in layer["sqnr"] for layer in order)]
    if not modalities:
        return None
    with figure(0.7 + 2.5 * len(modalities), len(modalities), width=width, sharey=True) as (fig, axes):
        for axis, modality in zip(axes, modalities, strict=True):
            known = {x["fqn"] for report in reports.values() for x in report["layers"] if modality in x["sqnr"]}
            seen = sorted((x for x in order if x["fqn"] in known), key=lambda layer: towers[layer["tower"]])
            for (name, report), colour in zip(reports.items(), _cycle(len(reports)), strict=True):
                values = {x["fqn"]: x["sqnr"][modality] for x in report["layers"] if modality in x["sqnr"]}
                _noise_points(axis, seen, [values.get(x["fqn"], math.nan) for x in seen], colour, name, width)
            axis.set_title(f"{modality} rows")
            axis.grid(axis="y", linewidth=0.6)
            axis.set_ylabel("SQNR, dB")
            _layer_axis(axis, seen, width)
        if len(reports) > 1:
            _legend(fig, axes[0])
        return png(fig)


def _noise_points(axis: Any, layers: Sequence[Row], values: Sequence[float], colour: str, name: str, width: float) -> None:
    """A dot a layer.  A line joins neighbours of one tower; of many layers, the medians of blocks."""
    if all(map(math.isnan, values)):
        return
    many = len(layers) > width * LABELS
    axis.plot(range(len(layers)), values, "o", color=colour, markersize=1.5 if many else 3, label=name, alpha=0.6 if many else 1)
    for _, run in groupby(enumerate(layers), key=lambda pair: pair[1]["tower"]):
        at = [i for i, _ in run]
        x, y = _medians(at, layers, values) if many else (at, [values[i] for i in at])
        axis.plot(x, y, "-", color=colour, linewidth=1.4 if many else 1)


def _medians(at: Sequence[int], layers: Sequence[Row], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Of each block: its middle and the median of its layers."""
    x: list[float] = []
    y: list[float] = []
    for _, run in groupby(at, key=lambda i: block(layers[i])):
        own = [i for i in run if not math.isnan(values[i])]
        x.append(statistics.mean(own) if own else math.nan)
        y.append(statistics.median(values[i] for i in own) if own else math.nan)
    return x, y


def _cycle(n: int) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(n)] if n > 1 else [SERIES[1]]


def incoherence_plot(reports: Mapping[str, Row], *, width: float = WIDE) -> str | None:
    """μ of every linear weight after the rewrites against before, one panel for each report; None without data."""
    panels = {name: report for name, report in reports.items() if report["incoherence"]}
    if not panels:
        return None
    ends = [v for report in panels.values() for pair in report["incoherence"].values() for v in pair if math.isfinite(v)]
    low, high = 0.85 * min(ends, default=1.0), 1.2 * max(ends, default=10.0)
    columns = 3 if width > NARROW else 1
    rows = -(-len(panels) // columns)
    with figure(0.5 + rows * min(width / columns, 3.7), rows, columns, width=width) as (fig, axes):
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis, (name, report) in zip(axes, panels.items(), strict=False):
            _incoherence_points(axis, report)
            axis.plot((low, high), (low, high), color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
            axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
            axis.set_title(name if len(reports) > 1 else "")
            for scale in (axis.xaxis, axis.yaxis):
                ticks = [v for v in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if low <= v <= high]
                scale.set_ticks(ticks, [f"{v}" for v in ticks])
                scale.set_ticks([], minor=True)
            axis.set_xlabel("μ before")
            axis.set_ylabel("μ after")
            axis.grid(linewidth=0.6)
            axis.set_axisbelow(True)
        named = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
        fig.legend(named.values(), named.keys(), ncols=3, loc="outside lower left")
        return png(fig)


def _incoherence_points(axis: Any, report: Row) -> None:
    """One dot a weight, coloured by tower; the largest after the rewrites carries its name."""
    known = {fqn: pair for fqn, pair in report["incoherence"].items() if all(map(math.isfinite, pair))}
    for tower, colour in TOWER_COLOURS.items():
        points = [pair for fqn, pair in known.items() if report["towers"].get(fqn, "language") == tower]
        if points:
            x, y = zip(*points, strict=True)
            axis.scatter(x, y, s=16, color=colour, alpha=0.75, linewidths=0, label=f"{tower} ({len(points)})")
    for fqn in sorted(known, key=lambda fqn: -known[fqn][1])[:1]:
        low, high = axis.get_xlim()
        right = math.log(known[fqn][0]) > (math.log(low) + math.log(high)) / 2 if low > 0 else True
        side: Any = {"xytext": (-6, 0), "ha": "right"} if right else {"xytext": (6, 0), "ha": "left"}
        name = short(fqn.removesuffix(".weight"))
        axis.annotate(name, known[fqn], textcoords="offset points", fontsize=8, va="center", **side)


def recovery_plot(rows: Sequence[tuple[str, float]], *, width: float = WIDE) -> str | None:
    """Horizontal bars of accuracy kept, in per cent of the float model; None without rows."""
    if not rows:
        return None
    with figure(0.55 + 0.36 * len(rows), width=width) as (fig, (axis,)):
        names, values = zip(*rows, strict=True)
        colours = ["#c0392b" if v < 0.9 else "#d9a22b" if v < 0.98 else "#2a9d6e" for v in values]
        axis.barh(range(len(rows)), [100 * v for v in values], 0.62, color=colours)
        for i, v in enumerate(values):
            end = 100 * v if v < 0.84 else max(100 * v, 100)  # no label stands on the line at 100
            axis.text(end + 0.9, i, f"{100 * v:.1f} %", va="center", fontsize=9)
        axis.set_yticks(range(len(rows)), names, fontsize=9, color=INK)
        axis.invert_yaxis()
        axis.set_xlim(0, 112 if width > NARROW else 125)
        axis.axvline(100, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel("recovery, % of the float model's accuracy")
        return png(fig)
