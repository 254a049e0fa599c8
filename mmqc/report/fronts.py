"""The picture of `mmqc compare`: divergence from the float model over bytes, and over measured speed where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqc.report.plots import COLOURS, INK, MUTED, WIDE, figure

Row = Mapping[str, Any]
SIZE, WIDTH, LINE = 7.5, 4.4, 9.0  # of names, their letters and their lines, in points


def write_front(path: Path, rows: Sequence[Row], ahead: Sequence[str]) -> None:
    """Write a picture (its format by the file's name).

    Args:
        path: E.g. front.png.
        rows: Of each recipe "recipe", "bytes", "KL" with "KL low" and "KL high", maybe "tokens_per_s"; one without KL is left out.
        ahead: The recipes on the front of KL over bytes, which a line joins.

    Raises:
        ImportError: matplotlib is not installed.
    """
    quantized = [row for row in rows if "KL" in row]
    timed = all("tokens_per_s" in row for row in quantized)
    with figure(4.2, columns=2 if timed else 1, width=WIDE) as (fig, axes):
        for axis, key, unit in zip(axes, ("bytes", "tokens_per_s"), (1e6, 1), strict=False):
            for row in quantized:
                _point(axis, row, row[key] / unit, row["recipe"] in ahead)
            axis.set_xlabel("MB of weights" if key == "bytes" else "tokens/s, batch 1")
            # Linear below the smallest: a divergence of 0 has its place.
            least = min((row["KL"] for row in quantized if row["KL"] > 0), default=1e-3)
            axis.set_yscale("symlog", linthresh=least)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y")
            _names(fig, axis, [(row[key] / unit, row["KL"], row["recipe"]) for row in quantized])
        on = sorted((row["bytes"] / 1e6, row["KL"]) for row in quantized if row["recipe"] in ahead)
        axes[0].plot(*zip(*on, strict=True), color=COLOURS["visual"], linewidth=1, zorder=1)
        axes[0].set_ylabel("KL from the float model, nats a token")
        fig.savefig(path, dpi=150)


def _point(axis: Any, row: Row, x: float, ahead: bool) -> None:
    colour = COLOURS["visual"] if ahead else MUTED
    reach = [[row["KL"] - row["KL low"]], [row["KL high"] - row["KL"]]]
    axis.errorbar(x, row["KL"], yerr=reach, fmt="o", markersize=5, color=colour, elinewidth=1, capsize=2, zorder=2)


def _names(fig: Any, axis: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Each point's name to its right, moved up or down until no two are on one another, with a line to where it belongs."""
    axis.margins(x=0.12)
    fig.canvas.draw()  # places are known from here on
    pixels, place = fig.dpi / 72, axis.transData
    taken: list[tuple[float, float, float]] = []
    for (x, y), name in sorted((tuple(place.transform((x, y))), name) for x, y, name in points):
        begin, end = x + 6 * pixels, x + (6 + WIDTH * len(name)) * pixels
        height = _free(taken, begin, end, y, LINE * pixels)
        taken.append((begin, end, height))
        line = dict(arrowstyle="-", color=MUTED, linewidth=0.5, shrinkA=0, shrinkB=3) if height != y else None
        at, moved = place.inverted().transform((x, y)), (6, (height - y) / pixels)
        axis.annotate(name, at, moved, textcoords="offset points", fontsize=SIZE, color=INK, va="center", arrowprops=line)


def _free(taken: Sequence[tuple[float, float, float]], begin: float, end: float, y: float, line: float) -> float:
    """The height next to ``y`` at which no name (beginning, end, height) is in the way."""
    near = [height for first, last, height in taken if first < end and begin < last]
    tries = (y + sign * step * line / 2 for step in range(80) for sign in (1, -1))
    return next((each for each in tries if all(abs(each - height) >= line for height in near)), y)
