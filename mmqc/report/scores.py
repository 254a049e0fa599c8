"""The report's plots of a packed cache: the scores of visual tokens by layer, and the error of their softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmqc.report.plots import MUTED, NARROW, WIDE, figure, png
from mmqc.report.score_histogram import CALIBRATED, EXACT, ROUNDED, ScoreHistogram
from mmqc.report.tables import count

COLOURS = {EXACT: "#b9bec6", ROUNDED: "#2f6db5", CALIBRATED: "#c0392b"}
COLUMNS, PANELS = 4, 8


def scores_plot(layers: Sequence[ScoreHistogram], *, width: float = WIDE) -> str | None:
    """Densities of the scores, a panel a layer; of more than 8 layers, 8 evenly spread; None without any."""
    if not layers:
        return None
    chosen = layers
    if len(layers) > PANELS:
        chosen = [layers[round(i * (len(layers) - 1) / (PANELS - 1))] for i in range(PANELS)]
    columns = COLUMNS if width > NARROW else 2
    rows = -(-len(chosen) // columns)
    with figure(0.4 + 1.9 * rows, rows, columns, width=width) as (fig, axes):
        for axis in axes[len(chosen) :]:
            axis.set_visible(False)
        for axis, layer in zip(axes, chosen, strict=False):
            _densities(axis, layer)
        kinds = {kind for layer in chosen for kind in layer.counts}
        shown = next(i for i, layer in enumerate(chosen) if set(layer.counts) == kinds)
        fig.legend(*axes[shown].get_legend_handles_labels(), loc="outside upper right", ncols=3)
        fig.supxlabel("score", color=MUTED, fontsize=9)
        return png(fig)


def _densities(axis: Any, layer: ScoreHistogram) -> None:
    edges = np.linspace(layer.low, layer.high, len(layer.counts[EXACT]) + 1)
    width = max(edges[1] - edges[0], 1e-12)
    for kind, counts in layer.counts.items():
        density = np.asarray(counts) / (max(sum(counts), 1) * width)
        filled = kind == EXACT
        axis.stairs(density, edges, fill=filled, color=COLOURS[kind], linewidth=1.3, label=kind)
    tau = f"  τ = {layer.tau[0]:g}, {layer.tau[1]:g}" if any(layer.tau) else ""
    axis.set_title(f"layer {layer.layer}  {count(layer.bits, 'bit')}{tau}")
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="x", length=0)


def error_plot(layers: Sequence[ScoreHistogram], *, width: float = WIDE) -> str | None:
    """Mean squared error of the softmax over the visual tokens by layer; None for fewer than two layers."""
    if len(layers) < 2:
        return None
    with figure(2.3, width=width) as (fig, (axis,)):
        kinds = (ROUNDED, CALIBRATED) if any(CALIBRATED in layer.error for layer in layers) else (ROUNDED,)
        for kind in kinds:
            points = [(layer.layer, layer.error_of(kind)) for layer in layers]
            axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[kind], markersize=3, linewidth=1, label=kind)
        axis.set(ylim=(0, None), xlabel="layer", ylabel="MSE of the softmax")
        axis.ticklabel_format(axis="y", scilimits=(0, 0))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y", linewidth=0.6)
        axis.legend(ncols=2, loc="upper right", bbox_to_anchor=(1, 1.2))
        return png(fig)
