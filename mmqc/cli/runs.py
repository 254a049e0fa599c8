"""What commands write with ``--json``, and the page that `mmqc report` makes of it and of quantized models' directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

END = (" low", " high")  # of an interval, behind the name of what it is around


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Figures to a file, if one was asked for; ``figures["model"]`` says whose they are."""
    if path is not None:
        from mmqc.report.whole_file import write_text

        write_text(path, json.dumps(figures, indent=1) + "\n")


def page(runs: list[Path], out: Path) -> Path:
    """The page about these runs, everything under its model's name.

    Raises:
        DataError: a path is not there, or nothing that mmqc wrote.
    """
    from mmqc.cli.doctor import environment
    from mmqc.report.html import write_html

    found = [(run, _read(run)) for run in runs]
    reports: dict[str, Any] = {}
    for run, data in found:
        if "layers" in data:
            name = run.resolve().name if run.is_dir() else run.stem
            reports[name if name not in reports else str(run)] = data
    parts: dict[str, Any] = {"table": [], "speed": [], "kernels": {}, "reports": reports, "environment": environment()}
    for run, data in found:
        model = Path(name).name if Path(name := str(data.get("model") or run.stem)).exists() else name
        if "eval" in data:
            on = {"data": data["data"]} if data.get("data") else {}
            parts["table"].append({"model": model, **on, **with_intervals(data["eval"])})
        elif "bench" in data:
            parts["speed"] += [{"model": model, **row} for row in data["bench"]]
        elif "explain" in data:
            parts["kernels"][model] = data["explain"]
    return write_html(out, {"title": "Quantization report", **parts})


def _read(run: Path) -> dict[str, Any]:
    from mmqc.cli import checks
    from mmqc.cli.chat_data import DataError

    file = run / "quantization.json" if run.is_dir() else run
    if not file.is_file():
        raise DataError(f"{file} does not exist; pass output directories of `mmqc quantize` or JSON of `eval`, `bench`, `explain`")
    data = checks.read_json(file, "a quantization.json, or what `eval`, `bench` or `explain` wrote with --json,")
    if not {"eval", "bench", "explain"} & set(data) and not {"layers", "passes"} <= set(data):
        raise DataError(f"{file} is no report of mmqc; pass a quantization.json")
    return data


def with_intervals(figures: Mapping[str, Any]) -> dict[str, Any]:
    """A difference and the ends of its interval in one cell; likelihoods of single kinds of questions are left out."""
    cells: dict[str, Any] = {}
    for name, value in figures.items():
        if name.startswith("nll/") or (name.endswith(END) and name.rsplit(" ", 1)[0] in figures):
            continue
        if f"{name}{END[0]}" not in figures:
            cells[name] = value
            continue
        points = "accuracy" in name or "contains" in name
        ends = [100 * v if points else v for v in (value, *(figures[name + e] for e in END))]
        cells[f"{name}{', points' if points else ''} [95 %]"] = "{:+.3g} [{:+.3g}, {:+.3g}]".format(*ends)
    return cells
