"""What stands on top of the report's page: for each model its name, recipe, date and three numbers.

The numbers are size, accuracy and speed where a table of the page has measured them; where it has not, what quantization itself
knows of them: noise of the layers, and how many there are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmqc.config import KVSpec
from mmqc.report.recipe_words import recipe_words
from mmqc.report.tables import MODALITIES, Row, cache_bits, megabytes, totals


@dataclass(frozen=True)
class Number:
    """One of the three: a value with its unit, what it is, and whether it is a loss to look at."""

    value: str
    what: str
    bad: bool = False


@dataclass(frozen=True)
class Headline:
    """A model's line, or the top of the page if there is one model only."""

    model: str
    recipe: str
    date: str
    numbers: tuple[Number, Number, Number]


def headline(name: str, report: Row, results: Sequence[Row], speed: Sequence[Row]) -> Headline:
    """Of a report as ``QuantReport.to_dict`` has it; rows of the page's tables are its own where their "model" is ``name``."""
    words = recipe_words(report["config"])
    recipe = f"{called}: {words}" if (called := report.get("recipe")) else words
    own = [[row for row in rows if row.get("model") == name] for rows in (results, speed)]
    numbers = (_size(report), _accuracy(report, own[0]), _speed(report, own[1]))
    return Headline(report.get("model") or name, recipe, report.get("date", ""), numbers)


def _size(report: Row) -> Number:
    before, after = report["size_before"], report["size_after"]
    if before and after:
        return Number(f"{before / after:.1f}× smaller", f"{megabytes(before)} → {megabytes(after)}")
    if cache := cache_of(report):
        return Number(cache, "each value of the visual KV cache")
    return Number("-", "size was not measured")


def cache_of(report: Row) -> str | None:
    """The bits of the packed cache that a report's config asks for, in words."""
    kv = report["config"].get("kv")
    return cache_bits(KVSpec(**kv) if kv else None)


def _accuracy(report: Row, rows: Sequence[Row]) -> Number:
    kept = [row["recovery"] for row in rows if _finite(row.get("recovery"))]
    if kept:
        return Number(f"{100 * min(kept):.1f} %", "of the float model's accuracy", min(kept) < 0.9)
    noise = [(v, m, x["fqn"]) for x in report["layers"] for m, v in x["sqnr"].items() if _finite(v)]
    if noise:
        medians = [statistics.median(found) for m in MODALITIES if (found := [v for v, of, _ in noise if of == m])]
        lowest, modality, fqn = min(noise)
        return Number(f"{min(medians):.1f} dB", f"signal to noise, median layer; lowest {lowest:.1f} dB, {modality} rows of {fqn}")
    errors = [x["weight_error"] for x in report["layers"] if _finite(x["weight_error"])]
    if errors:
        return Number(f"{statistics.median(errors):.1%}", f"error of a weight, median; largest {max(errors):.1%}")
    if report.get("rewrite_error"):
        return Number(f"{report['rewrite_error']:.1e}", "relative change of the float model's output by the rewrites")
    return Number("-", "accuracy was not measured: mmqc eval does")


def _speed(report: Row, rows: Sequence[Row]) -> Number:
    fastest = max(rows, key=lambda row: row.get("tokens_per_s", 0), default=None)
    if fastest is not None and "tokens_per_s" in fastest:
        first = f"{fastest['how']}; the first after {1e3 * fastest['first_token_seconds']:,.0f} ms"
        return Number(f"{fastest['tokens_per_s']:,.0f} tokens/s", first)
    words = totals(len(report["layers"]), len(report["refused"]), report["seconds"], cache_of(report)).split(", ")
    return Number(words[0].removesuffix(" quantized"), ", ".join(["quantized" if report["layers"] else "", *words[1:]]).strip(", "))


def comparison(lines: Mapping[str, Headline]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Several models' headlines as a table: head and rows."""
    head = ("model", "recipe", "date", "size", "accuracy or noise", "speed or layers")
    rows = [(name, line.recipe, line.date, *(number.value for number in line.numbers)) for name, line in lines.items()]
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return tuple(head[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
