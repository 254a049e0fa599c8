"""How near the linears of benchmarks/results/linear.json come to what the memory and the tensor cores give: two figures.

python -m benchmarks.pages.roofline        writes docs/results/weight_traffic.png and docs/results/roofline.png

bytes = N K b + M K a + M N c      weights (with their scales), inputs and outputs once each
operations = 2 M N K
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from mmqc.report.plots import INK, MUTED, WIDE, figure

ROOT = Path(__file__).resolve().parents[2]

PICTURES = ROOT / "docs/results"
# Contenders that move the same bytes would hide each other in the roofline: these are drawn a little aside.
ASIDE = {"int8": 0.93, "scaled_mm": 1.07}
# Dense rates of the data sheet, TFLOP/s and TOP/s.
SHEET = {"nvidia_h200": {"bf16": 989.0, "int8 and fp8": 1979.0}}


class Contender(NamedTuple):
    """Who multiplies: bytes of a weight, an input entry, the scales of a channel and of a group, an output entry; the look."""

    label: str
    weight: float
    entry: float
    channel: int
    group: int
    colour: str
    marker: str
    ours: bool = True
    out: int = 2


# Okabe and Ito's colours; what is not ours is hollow.
CONTENDERS = {
    "bf16": Contender("bf16, torch", 2, 2, 0, 0, "#000000", "s", False),
    "int8": Contender("int8", 1, 1, 4, 0, "#0072B2", "o"),
    "int_mm": Contender("int8, torch", 1, 1, 0, 0, "#0072B2", "o", False, out=4),
    "fp8": Contender("fp8", 1, 1, 4, 0, "#009E73", "D"),
    "scaled_mm": Contender("fp8, torch", 1, 1, 0, 0, "#009E73", "D", False),
    "int4": Contender("W4A8", 0.5, 1, 4, 0, "#D55E00", "^"),
    "w4": Contender("W4A16", 0.5, 2, 0, 4, "#CC79A7", "v"),
    "tinygemm": Contender("W4A16, tinygemm", 0.5, 2, 0, 4, "#E69F00", "v", False),
    "gemlite": Contender("W4A16, gemlite", 0.5, 2, 0, 4, "#56B4E9", "<", False),
    "humming": Contender("W4A16, humming", 0.5, 2, 0, 2, "#8a6d00", ">", False),
}


class Point(NamedTuple):
    """One time: what was multiplied, by whom, the bytes that must move and the operations."""

    linear: str
    rows: int
    who: str
    bytes: float
    operations: float
    seconds: float


def load(name: str) -> dict[str, Any] | None:
    """One result file, or None where it was never written."""
    path = ROOT / f"benchmarks/results/{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def points(linear: dict[str, Any]) -> list[Point]:
    """Every time of the file whose contender is known here."""
    found = []
    for where, times in linear["microseconds"].items():
        name, _, rows = where.partition("/")
        if name not in linear["shapes"]:
            continue
        (n, k), m = linear["shapes"][name], int(rows)
        for who, us in times.items():
            if who in CONTENDERS:
                c = CONTENDERS[who]
                weights = n * k * (c.weight + c.group / linear["group_size"]) + n * c.channel
                found.append(Point(name, m, who, weights + m * k * c.entry + m * n * c.out, 2 * m * n * k, 1e-6 * us))
    return found


def style(who: str, size: float = 34) -> dict[str, Any]:
    c = CONTENDERS[who]
    return {
        "marker": c.marker,
        "s": size,
        "edgecolors": c.colour,
        "linewidths": 1.2,
        "facecolors": c.colour if c.ours else "none",
        "zorder": 3,
    }


def ceiling(axis: Any, at: float, text: str, start: float | None = None, dashed: bool = False, va: str = "center") -> None:
    """A level line, its name right of the axes; dashed where it is not measured."""
    dashes = (0, (4, 3)) if dashed else "-"
    ends = (axis.get_xlim()[0] if start is None else start, axis.get_xlim()[1])
    axis.plot(ends, (at, at), color=MUTED, linewidth=1, linestyle=dashes, zorder=1)
    axis.annotate(
        text,
        (1, at),
        (6, 0),
        xycoords=axis.get_yaxis_transform(),
        textcoords="offset points",
        va=va,
        fontsize=8,
        color=MUTED,
        annotation_clip=False,
    )


def strip(axis: Any, found: list[Point], order: list[str], value: Any) -> list[str]:
    """One column a linear, its contenders side by side in a fixed order; the contenders that occur."""
    who = [name for name in CONTENDERS if any(p.who == name for p in found)]
    for name in who:
        shift = (who.index(name) - (len(who) - 1) / 2) * 0.8 / len(who)
        some = [p for p in found if p.who == name]
        axis.scatter([order.index(p.linear) + shift for p in some], [value(p) for p in some], **style(name))
    for i in range(1, len(order), 2):  # every other column is shaded: ten marks of a column belong together
        axis.axvspan(i - 0.5, i + 0.5, color="#f6f7f9", linewidth=0, zorder=0)
    axis.set_xlim(-0.5, len(order) - 0.5)
    axis.tick_params(length=0)
    axis.grid(axis="y", linewidth=0.6)
    axis.set_axisbelow(True)
    return who


def names(axis: Any, linear: dict[str, Any], order: list[str]) -> None:
    labels = [f"{name}\n{linear['shapes'][name][0]}\nx {linear['shapes'][name][1]}" for name in order]
    axis.set_xticks(range(len(order)), labels, fontsize=8, color=INK)


def legend(fig: Any, axis: Any, who: list[str]) -> None:
    marks = [axis.scatter([], [], label=CONTENDERS[name].label, **style(name)) for name in who]
    fig.legend(handles=marks, loc="outside upper left", ncols=10, fontsize=8.5, handletextpad=0.2, columnspacing=1.2)


def by_size(linear: dict[str, Any], found: list[Point]) -> list[str]:
    """Linears, the largest weight first."""
    present = {p.linear for p in found}
    return sorted((name for name in linear["shapes"] if name in present), key=lambda name: -math.prod(linear["shapes"][name]))


def draw_weight_traffic(linear: dict[str, Any], copy: float | None, rows: tuple[int, ...] = (1, 16)) -> Path | None:
    """TB/s at few rows, next to what a copy reaches."""
    found = [p for p in points(linear) if p.rows in rows and p.who not in ("int_mm", "scaled_mm")]
    if not found:
        return None
    order = by_size(linear, found)
    with figure(6.2, len(rows), width=WIDE, sharex=True) as (fig, axes):
        who: set[str] = set()
        for axis, m in zip(axes, rows, strict=True):
            who |= set(strip(axis, [p for p in found if p.rows == m], order, lambda p: 1e-12 * p.bytes / p.seconds))
            axis.set_title("1 row" if m == 1 else f"{m} rows")
            axis.set_ylabel("TB/s")
            axis.set_ylim(0, 1.12 * copy if copy else None)
            if copy:
                ceiling(axis, copy, f"{copy:.2f}, a copy\nof 1 GiB")
        names(axes[-1], linear, order)
        legend(fig, axes[0], [name for name in CONTENDERS if name in who])
        path = PICTURES / "weight_traffic.png"
        fig.savefig(path, dpi=150)
    return path


def roofs(linear: dict[str, Any]) -> list[tuple[float, str, bool]]:
    """Rate, name and whether it is the data sheet's, of every ceiling of the tensor cores."""
    found = [(at, f"{at:,.0f} {name}, data sheet", True) for name, at in SHEET.get(linear["device"], {}).items()]
    measured = linear["tb_per_s"].get("bf16 TFLOP/s")
    return [*found, (measured, f"{measured:,.0f} bf16, measured", False)] if measured else found


def draw_roofline(linear: dict[str, Any], copy: float | None, rows: tuple[int, ...] = (2048, 8192)) -> Path | None:
    """TOP/s at many rows, and the roofline with all rows."""
    found = points(linear)
    many = [p for p in found if p.rows in rows]
    if not many:
        return None
    order = by_size(linear, many)
    top = 1.08 * max(at for at, *_ in [*roofs(linear), *((1e-12 * p.operations / p.seconds,) for p in many)])
    with figure(9.8, 3, width=WIDE, height_ratios=(1, 1, 1.25)) as (fig, axes):
        for axis, m in zip(axes, rows, strict=False):
            strip(axis, [p for p in many if p.rows == m], order, lambda p: 1e-12 * p.operations / p.seconds)
            axis.set_title(f"{m:,} rows")
            axis.set_ylabel("TFLOP/s or TOP/s")
            axis.set_ylim(0, top)
            names(axis, linear, order)
            for at, text, sheet in roofs(linear):
                ceiling(axis, at, text, dashed=sheet)
        _roofline(axes[2], found, copy, roofs(linear))
        present = {p.who for p in found}
        legend(fig, axes[0], [name for name in CONTENDERS if name in present])
        path = PICTURES / "roofline.png"
        fig.savefig(path, dpi=150)
    return path


def _roofline(axis: Any, found: list[Point], copy: float | None, ceilings: list[tuple[float, str, bool]]) -> None:
    """Operations a second over operations a byte, both logarithmic."""
    at = [(ASIDE.get(p.who, 1) * p.operations / p.bytes, 1e-12 * p.operations / p.seconds) for p in found]
    axis.set(xscale="log", yscale="log", xlim=(0.6, 2 * max(x for x, _ in at)), ylim=(0.4 * min(y for _, y in at), 4000))
    for name in CONTENDERS:
        some = [xy for p, xy in zip(found, at, strict=True) if p.who == name]
        axis.scatter(*zip(*some, strict=True), **{**style(name, 20), "linewidths": 0.9}) if some else None
    for level, text, sheet in ceilings:
        # measured and promised rates of bf16 are close here: one name above its line, one below
        ceiling(axis, level, text, level / copy if copy else None, sheet, "bottom" if sheet else "top")
    if copy:
        knee = max((level for level, *_ in ceilings), default=1000.0) / copy
        axis.plot((0.6, knee), (0.6 * copy, knee * copy), color=MUTED, linewidth=1, zorder=1)
        # Text in data coordinates can be turned with a line: there, slope one on paper is y / x.
        x, y = 7.0, 8.4 * copy
        axis.text(
            x,
            y,
            f"memory: {copy:.2f} TB/s, a copy of 1 GiB",
            fontsize=8,
            color=MUTED,
            ha="center",
            va="bottom",
            rotation=math.degrees(math.atan(y / x)),
            rotation_mode="anchor",
            transform_rotates_text=True,
        )
    for group in ((1,), (16,), (2048, 8192)):
        some = [xy for p, xy in zip(found, at, strict=True) if p.rows in group]
        if some:
            middle = statistics.geometric_mean(x for x, _ in some)
            text = " and ".join(f"{m:,}" for m in group) + (" row" if group == (1,) else " rows")
            axis.annotate(
                text, (middle, min(y for _, y in some)), (0, -9), textcoords="offset points", ha="center", va="top", fontsize=8.5
            )
    for scale in (axis.xaxis, axis.yaxis):
        low, high = scale.get_view_interval()
        ticks = [t for t in (1, 10, 100, 1000) if low <= t <= high]
        scale.set_ticks(ticks, [f"{t:,}" for t in ticks])
        scale.set_ticks([], minor=True)
    axis.set_title("all rows, against the roofline")
    axis.set_xlabel("operations a byte that must move")
    axis.set_ylabel("TFLOP/s or TOP/s")
    axis.grid(linewidth=0.6)
    axis.set_axisbelow(True)


def draw() -> list[Path]:
    """Both figures, from what there is."""
    linear, rows = load("linear"), load("row_kernels")
    if linear is None:
        return []
    alike = rows is not None and rows["device"] == linear["device"]  # another GPU's memory is no roof of this one
    copy = linear["tb_per_s"].get("copy") or (rows["tb_per_s"].get("copy") if rows and alike else None)
    return [path for path in (draw_weight_traffic(linear, copy), draw_roofline(linear, copy)) if path]


if __name__ == "__main__":
    print(*draw())
