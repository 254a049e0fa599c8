"""The picture of `mmqc compare`: divergence from the float model over bytes, and over measured speed where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqc.report.plots import COLOURS, INK, MUTED, WIDE, figure

Row = Mapping[str, Any]


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
        on = sorted((row["bytes"] / 1e6, row["KL"]) for row in quantized if row["recipe"] in ahead)
        axes[0].plot(*zip(*on, strict=True), color=COLOURS["visual"], linewidth=1, zorder=1)
        axes[0].set_ylabel("KL from the float model, nats a token")
        fig.savefig(path, dpi=150)


def _point(axis: Any, row: Row, x: float, ahead: bool) -> None:
    colour = COLOURS["visual"] if ahead else MUTED
    reach = [[row["KL"] - row["KL low"]], [row["KL high"] - row["KL"]]]
    axis.errorbar(x, row["KL"], yerr=reach, fmt="o", markersize=5, color=colour, elinewidth=1, capsize=2, zorder=2)
    axis.annotate(row["recipe"], (x, row["KL"]), (5, 3), textcoords="offset points", fontsize=7.5, color=INK)
