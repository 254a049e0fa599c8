"""Throughput over memory budgets, a line for each bits and way, the batch at each point: the paper's Figure 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(data: dict[str, Any], path: Path) -> None:
    """The rows of ``kv_throughput_runs.summary`` as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'mmqc[report]', or leave --plot out") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        if row["throughput"]:
            lines.setdefault((row["bits"], row["way"]), []).append(row)
    for (bits, way), rows in lines.items():
        rows.sort(key=lambda row: row["budget"])
        x, y = [row["budget"] for row in rows], [row["throughput"] for row in rows]
        axes.plot(x, y, marker="o", label=f"{bits} bits, {way}", linestyle="--" if bits == 16 else "-")
        for row in rows:
            at = (row["budget"], row["throughput"])
            axes.annotate(str(row["batch"]), at, textcoords="offset points", xytext=(0, 5), fontsize=7, ha="center")
    settings = data["settings"]
    axes.set(xlabel="cache and activations, GB", ylabel="tokens a second, decoding", ylim=(0, None))
    axes.set_title(f"{settings['visual']} visual tokens, {data['device']}; at each point the batch", fontsize=10)
    if lines:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
