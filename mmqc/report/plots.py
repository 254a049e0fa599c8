"""The report's plots, as PNG data URIs; matplotlib is imported only when one is drawn."""

from __future__ import annotations

import base64
import io
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
WIDTH = 11.2


@contextmanager
def figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Figure, list[Any]]]:
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
        fig = Figure(figsize=(WIDTH, height), layout="constrained")
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


def distinct_inputs(layers: Sequence[Row]) -> list[Row]:
    """One layer for each input: q, k and v read the same tensor, so only the first is drawn."""
    kept: list[Row] = []
    for layer in layers:
        if not kept or layer["ranges"] != kept[-1]["ranges"]:
            kept.append(layer)
    return kept


def ranges_plot(reports: Mapping[str, Row], towers: Sequence[str]) -> str | None:
    """Smallest and largest input of every layer in ``towers``, visual rows against text rows; None without data."""
    panels = {
        name: kept
        for name, report in reports.items()
        if (kept := distinct_inputs([x for x in report["layers"] if x["tower"] in towers and x["ranges"]]))
    }
    if not panels:
        return None
    widest = max(abs(v) for kept in panels.values() for layer in kept for r in layer["ranges"].values() for v in r)
    with figure(0.6 + 2.35 * len(panels), len(panels)) as (fig, axes):
        for axis, (name, layers) in zip(axes, panels.items(), strict=True):
            _range_bars(axis, layers)
            axis.set_title(name + _spread(layers))
            axis.set_yscale("symlog", linthresh=1, linscale=0.7)
            axis.set_ylim(-1.3 * widest, 1.3 * widest)
            _layer_axis(axis, layers)
        axes[0].legend(ncols=2, loc="upper right", bbox_to_anchor=(1, 1.18))
        fig.supylabel("input values", color=MUTED, fontsize=9)
        return png(fig)


def _spread(layers: Sequence[Row]) -> str:
    """How much further visual inputs reach than text inputs, for a panel's title."""
    reach = [{m: max(map(abs, ends)) for m, ends in layer["ranges"].items()} for layer in layers]
    ratios = [r["visual"] / r["text"] for r in reach if r.get("visual") and r.get("text")]
    return f"   (visual / text: median {statistics.median(ratios):.1f}, largest {max(ratios):.1f})" if ratios else ""


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


def _layer_axis(axis: Any, layers: Sequence[Row]) -> None:
    axis.set_xlim(-0.7, len(layers) - 0.3)
    # beyond this many the labels would overlap; the table on the page has every name
    step = -(-len(layers) // 60)
    axis.set_xticks(range(0, len(layers), step), [short(layer["fqn"]) for layer in layers[::step]], rotation=60, ha="right")
    axis.tick_params(axis="x", length=0, pad=1)
    towers = [layer["tower"] for layer in layers]
    for i in range(1, len(towers)):
        if towers[i] != towers[i - 1]:
            axis.axvline(i - 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))


def sqnr_plot(reports: Mapping[str, Row]) -> str | None:
    """SQNR of every layer's output, one panel for each modality, one line for each report; None without data."""
    order = list({layer["fqn"]: layer for report in reports.values() for layer in report["layers"] if layer["sqnr"]}.values())
    towers = {tower: i for i, tower in enumerate(dict.fromkeys(layer["tower"] for layer in order))}
    modalities = [m for m in MODALITIES if any(m in layer["sqnr"] for layer in order)]
    if not modalities:
        return None
    with figure(0.7 + 2.5 * len(modalities), len(modalities), sharey=True) as (fig, axes):
        for axis, modality in zip(axes, modalities, strict=True):
            known = {x["fqn"] for report in reports.values() for x in report["layers"] if modality in x["sqnr"]}
            seen = [x for x in order if x["fqn"] in known]
            seen.sort(key=lambda layer: towers[layer["tower"]])
            at = {layer["fqn"]: i for i, layer in enumerate(seen)}
            for (name, report), colour in zip(reports.items(), _cycle(len(reports)), strict=True):
                points = sorted((at[x["fqn"]], x["sqnr"][modality]) for x in report["layers"] if modality in x["sqnr"])
                axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1, label=name) if points else None
            axis.set_title(f"{modality} rows")
            axis.grid(axis="y", linewidth=0.6)
            axis.set_ylabel("SQNR, dB")
            _layer_axis(axis, seen)
        if len(reports) > 1:
            axes[0].legend(ncols=len(reports), loc="upper right", bbox_to_anchor=(1, 1.2))
        return png(fig)


def _cycle(n: int) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(n)] if n > 1 else [SERIES[1]]


def incoherence_plot(reports: Mapping[str, Row]) -> str | None:
    """μ of every linear weight after the rewrites against before, one panel for each report; None without data."""
    panels = {name: report for name, report in reports.items() if report["incoherence"]}
    if not panels:
        return None
    ends = [v for report in panels.values() for pair in report["incoherence"].values() for v in pair if math.isfinite(v)]
    low, high = 0.85 * min(ends, default=1.0), 1.2 * max(ends, default=10.0)
    with figure(0.5 + WIDTH / 3, columns=max(3, len(panels))) as (fig, axes):
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis, (name, report) in zip(axes, panels.items(), strict=False):
            _incoherence_points(axis, report)
            axis.plot((low, high), (low, high), color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
            axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal", title=name)
            for scale in (axis.xaxis, axis.yaxis):
                ticks = [v for v in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if low <= v <= high]
                scale.set_ticks(ticks, [f"{v}" for v in ticks])
                scale.set_ticks([], minor=True)
            axis.set_xlabel("μ before")
            axis.grid(linewidth=0.6)
            axis.set_axisbelow(True)
        axes[0].set_ylabel("μ after")
        axes[len(panels) - 1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
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
        name = short(fqn.removesuffix(".weight"))
        axis.annotate(name, known[fqn], (-6, 0), textcoords="offset points", fontsize=8, ha="right", va="center")


def recovery_plot(rows: Sequence[tuple[str, float]]) -> str | None:
    """Horizontal bars of accuracy kept, in per cent of the float model; None without rows."""
    if not rows:
        return None
    with figure(0.55 + 0.36 * len(rows)) as (fig, (axis,)):
        names, values = zip(*rows, strict=True)
        colours = ["#c0392b" if v < 0.9 else "#d9a22b" if v < 0.98 else "#2a9d6e" for v in values]
        axis.barh(range(len(rows)), [100 * v for v in values], 0.62, color=colours)
        for i, v in enumerate(values):
            axis.text(100 * v + 0.6, i, f"{100 * v:.1f} %", va="center", fontsize=9)
        axis.set_yticks(range(len(rows)), names, fontsize=9, color=INK)
        axis.invert_yaxis()
        axis.set_xlim(0, 112)
        axis.axvline(100, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel("recovery, % of the float model's accuracy")
        return png(fig)
