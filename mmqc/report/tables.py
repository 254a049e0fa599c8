"""What the report's text and its page say in the same words: totals, rows by tower, numbers and nouns.

A layer is a dict with the names of ``LayerReport``'s fields, as ``QuantReport.to_dict`` has them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

from mmqc.config import TOWERS, KVSpec

T = TypeVar("T")
Row = Mapping[str, Any]
MODALITIES = ("visual", "text")
TOWER_HEAD = ("tower", "layers", "scheme", "visual, dB", "text, dB", "clipped", "W error", "outliers")  # of ``tower_rows``


def by_tower(layers: Sequence[T], tower_of: Callable[[T], str]) -> dict[str, list[T]]:
    """The layers of each tower that has some, towers in the order of the data flow."""
    names = list(TOWERS) + sorted({tower_of(layer) for layer in layers} - set(TOWERS))
    towers = {name: [layer for layer in layers if tower_of(layer) == name] for name in names}
    return {name: layers for name, layers in towers.items() if layers}


def tower_rows(layers: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line of totals a tower; SQNR as median (lowest) in dB, clipped as the largest fraction of any layer."""
    return [_tower_row(tower, found) for tower, found in by_tower(layers, lambda layer: layer["tower"]).items()]


def _tower_row(tower: str, layers: Sequence[Row]) -> tuple[str, ...]:
    sqnr = [spread([layer["sqnr"][m] for layer in layers if m in layer["sqnr"]]) for m in MODALITIES]
    clipped = max((v for layer in layers for v in layer["saturated"].values()), default=0.0)
    errors = [layer["weight_error"] for layer in layers if math.isfinite(layer["weight_error"])]
    return (
        tower or "(not traced)",
        str(len(layers)),
        ", ".join(dict.fromkeys(layer["scheme"] for layer in layers)),
        *sqnr,
        f"{clipped:.2%}",
        f"{statistics.median(errors):.2%}" if errors else "-",
        str(sum(layer["outliers"] for layer in layers)),
    )


def totals(layers: int, refusals: int, seconds: float, cache: str | None) -> str:
    """E.g. "46 layers quantized, visual KV cache in 2 bits, 1 refusal, 8.1 s"."""
    packed = [f"visual KV cache in {cache}"] if cache else []
    parts = [f"{count(layers, 'layer')} quantized"] if layers or not packed else []
    return ", ".join([*parts, *packed, count(refusals, "refusal"), f"{seconds:.1f} s"])


def cache_bits(kv: KVSpec | None) -> str | None:
    """E.g. "2 bits", "2 bits on average"; None without a packed cache."""
    if kv is None:
        return None
    return count(kv.bits, "bit") + (" on average" if kv.layers_differ else "")


def count(n: int, what: str) -> str:
    """E.g. "1 layer", "2 layers", "3 passes"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('s') else 's'}"


def megabytes(size: float) -> str:
    """E.g. "28.0 MB", "14.2 GB"."""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def decibels(value: float | None, unit: str = " dB") -> str:
    """E.g. "31.4 dB"; a dash for what was not measured."""
    return "-" if value is None or math.isnan(value) else f"{value:.1f}{unit}"


def spread(values: Sequence[float]) -> str:
    """Median and lowest, e.g. "33.0 (28.1)"."""
    return f"{statistics.median(values):.1f} ({min(values):.1f})" if values else "-"


def text_table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Columns padded to their widest cell, two spaces apart; numbers to the right."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(widths))]
    pad = lambda cell, i: cell.rjust(widths[i]) if right[i] else cell.ljust(widths[i])  # noqa: E731
    lines = ["  ".join(pad(cell, i) for i, cell in enumerate(row)).rstrip() for row in cells]
    return "\n".join(lines)


def html_table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """The same as HTML, escaped, without styles: a notebook has its own."""
    tags = [("th", head), *(("td", row) for row in rows)]
    lines = ("".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row) for tag, row in tags)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def html_lines(lines: Iterable[str]) -> str:
    """Lines of text as a paragraph, escaped."""
    return f"<p>{'<br>'.join(map(escape, lines))}</p>"


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit() or cell[:1] == "-"
