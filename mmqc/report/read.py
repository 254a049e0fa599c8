"""A QuantReport from the JSON that ``report.save("quantization.json")`` wrote, for pages about several runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmqc.config import QuantConfig
from mmqc.report.report import LayerReport, QuantReport, Refusal
from mmqc.report.score_histogram import ScoreHistogram


def read_report(path: str | Path) -> QuantReport:
    """The report of a file.

    Raises:
        ValueError: the file is no report.
    """
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        return from_dict(data)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{path} is no report of mmqc: {type(e).__name__} {e}; pass a quantization.json") from e


def from_dict(data: Mapping[str, Any]) -> QuantReport:
    """The report that ``to_dict`` wrote; what JSON has no name for (infinity, NaN) comes back as NaN."""
    report = QuantReport(
        QuantConfig.from_dict(data["config"]),
        [_layer(row) for row in data["layers"]],
        [Refusal(**row) for row in data["refused"]],
        [_pass(row) for row in data["passes"]],
    )
    report.incoherence = {fqn: tuple(map(_number, pair)) for fqn, pair in data["incoherence"].items()}  # type: ignore[misc]
    report.kv_scores = [ScoreHistogram.from_dict(row) for row in data.get("kv_scores", ())]
    for name in ("seconds", "size_before", "size_after", "rewrite_error", "towers"):
        setattr(report, name, data[name])
    return report


def _layer(row: Mapping[str, Any]) -> LayerReport:
    known = {f.name for f in dataclasses.fields(LayerReport)}
    values = {k: v for k, v in row.items() if k in known}
    values["transforms"] = tuple(row["transforms"])
    values["sqnr"] = {m: math.inf if v is None else v for m, v in row["sqnr"].items()}
    values["ranges"] = {m: tuple(ends) for m, ends in row["ranges"].items()}
    values["weight_error"] = _number(row["weight_error"])
    return LayerReport(**values)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _pass(row: Mapping[str, Any]) -> Any:
    return SimpleNamespace(name=row["name"], exact=row["exact"], n_sites=row["sites"], misses=tuple(row["reasons"]), ms=row["ms"])
