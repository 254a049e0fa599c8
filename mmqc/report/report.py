"""What ``quantize_`` did: per layer, per tower, per pass, and everything it refused; as text, JSON or a web page."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmqc.config import QuantConfig, Scheme
from mmqc.graph.program import Program
from mmqc.report.score_histogram import CALIBRATED, ROUNDED, ScoreHistogram
from mmqc.report.tables import (
    MODALITIES,
    TOWER_HEAD,
    by_tower,
    cache_bits,
    count,
    decibels,
    html_lines,
    html_table,
    text_table,
    totals,
    tower_rows,
)
from mmqc.report.whole_file import write_text

WORST = 5
SHOWN = 10  # refusals in a notebook
FOLDED = {"fold_norm_scale": "norm gain folded", "fold_layer_scale": "layer scale folded"}  # in words
MEGABYTE = 1e6


@dataclass
class LayerReport:
    """One quantized linear.

    Attributes:
        fqn: its name in the model.
        tower: vision, projector or language.
        role: what it is in its block, e.g. q, down; as the graph says, not the name.
        scheme: the shorthand, e.g. W4A8.
        transforms: what the rewrites did to it, e.g. "norm gain folded", "rotated in", "online H12xH64".
        sqnr: signal-to-quantization-noise ratio of its output in dB, by modality, on calibration inputs.
        ranges: smallest and largest value of its input, by modality.
        saturated: fraction of its input that the static scale clips, by modality.
        weight_error: |W - Q| / |W| in the Frobenius norm.
        outliers: input channels kept in higher precision (rotation magnitude suppression).
        seconds: spent on solving it.
        note: what the solver had to say.
    """

    fqn: str
    tower: str
    role: str
    scheme: str
    transforms: tuple[str, ...] = ()
    sqnr: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    saturated: dict[str, float] = field(default_factory=dict)
    weight_error: float = math.nan
    outliers: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def worst_sqnr(self) -> float:
        """The lower of the modalities' SQNR in dB; infinite where nothing was measured."""
        return min(self.sqnr.values(), default=math.inf)


@dataclass(frozen=True)
class Refusal:
    """Something that was left as it was: the parameter or module, the graph node, and why."""

    fqn: str
    node: str
    reason: str

    def __str__(self) -> str:
        where = f" (node {self.node})" if self.node and self.node != self.fqn else ""
        return f"{self.fqn or 'the model'}{where}: {self.reason}"


@dataclass(repr=False)
class QuantReport:
    """The record of one ``quantize_``.

    Attributes:
        config: what was asked for, with the statistics that calibration measured.
        layers: every quantized linear in the model's order.
        refused: everything that a pass or the conversion left alone.
        passes: the runner's records: name, exact, n_sites, misses, ms.
        seconds: the whole call.
        size_before: bytes of parameters and buffers before.
        size_after: and after.
        rewrite_error: how far the exact rewrites moved the floating-point model's output on the first batch, relative.
        incoherence: μ of every linear weight of the recorded model, before and after the exact rewrites; see
            mmqc/quantization/incoherence.py.
        towers: the tower of each of these weights.
        kv_scores: for a packed cache, the scores of visual tokens in each of the decoder's layers, on one calibration batch.
        model: where it was loaded from, if from anywhere, and its class.
        recipe: what the config is called, where somebody has given it a name.
        date: when it was quantized.
    """

    config: QuantConfig
    layers: list[LayerReport] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    passes: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    size_before: int = 0
    size_after: int = 0
    incoherence: dict[str, tuple[float, float]] = field(default_factory=dict)
    rewrite_error: float = 0.0
    towers: dict[str, str] = field(default_factory=dict)
    kv_scores: list[ScoreHistogram] = field(default_factory=list)
    model: str = ""
    recipe: str = ""
    date: str = ""

    def summary(self) -> str:
        """A page of plain text: totals per tower, the layers that lose most, the passes, the refusals."""
        blocks = [
            self._headline(),
            self._towers(),
            self._incoherence(),
            self._rewrite_error(),
            self._worst(),
            self._scores(),
            self._passes(),
            self._refusals(),
        ]
        return "\n\n".join(block for block in blocks if block)

    __str__ = summary

    def __repr__(self) -> str:
        """One line; ``print(report)`` shows the page, ``report.layers`` and ``report.refused`` everything."""
        return f"QuantReport({self.totals()})"

    def _repr_html_(self) -> str:
        """What a notebook shows: totals, a row for each tower, and the first refusals."""
        more = len(self.refused) - SHOWN
        refused = [*map(str, self.refused[:SHOWN]), *([f"... and {more} more in report.refused"] if more > 0 else [])]
        rows = tower_rows([vars(layer) for layer in self.layers])
        table = html_table(TOWER_HEAD, rows) if rows else ""
        return "".join((html_lines(self._headline().splitlines()), table, html_lines(["refused", *refused]) if refused else ""))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: no tensors, no tuples, ``None`` for what was not measured."""
        return {
            "model": self.model,
            "recipe": self.recipe,
            "date": self.date,
            "config": plain(self.config.to_dict()),
            "layers": [plain(dataclasses.asdict(layer)) for layer in self.layers],
            "refused": [plain(dataclasses.asdict(refusal)) for refusal in self.refused],
            "passes": [_pass_row(record) for record in self.passes],
            "seconds": self.seconds,
            "size_before": self.size_before,
            "size_after": self.size_after,
            "incoherence": plain(self.incoherence),
            "rewrite_error": self.rewrite_error,
            "towers": dict(self.towers),
            "kv_scores": [plain(dataclasses.asdict(layer)) for layer in self.kv_scores],
        }

    def save(self, path: str | Path) -> Path:
        """Writes the report to ``path``: a self-contained page for .html, data for .json, the summary for .txt.

        Raises:
            ValueError: another suffix.
        """
        path = Path(path)
        if path.suffix not in (".html", ".json", ".txt"):
            raise ValueError(f"report.save({str(path)!r}): the suffix {path.suffix!r} is not one of .html, .json, .txt")
        if path.suffix == ".html":
            from mmqc.report.html import write_html

            return write_html(path, {"title": "Quantization report", "reports": {self.model or "the model": self}})
        text = json.dumps(self.to_dict(), indent=1) if path.suffix == ".json" else self.summary()
        write_text(path, text + "\n")
        return path

    def totals(self) -> str:
        """E.g. "46 layers quantized, 1 refusal, 8.1 s"."""
        return totals(len(self.layers), len(self.refused), self.seconds, cache_bits(self.config.kv))

    def _headline(self) -> str:
        schemes = "  ".join(f"{tower} {_worded(scheme)}" for tower, scheme in self.config.schemes.items())
        if not schemes:
            schemes = "no weight quantized" if self.config.kv else "nothing quantized"
        lines = [self.totals(), schemes]
        if self.size_before:
            share = self.size_after / self.size_before
            before, after = self.size_before / MEGABYTE, self.size_after / MEGABYTE
            lines.append(f"{before:.1f} MB -> {after:.1f} MB ({share:.0%})")
        return "\n".join(lines)

    def _towers(self) -> str:
        rows = tower_rows([vars(layer) for layer in self.layers])
        return f"SQNR by modality, median (lowest) of the layers\n{text_table(TOWER_HEAD, rows)}" if rows else ""

    def by_tower(self) -> dict[str, list[LayerReport]]:
        """The layers of each tower that has some, towers in the order of the data flow."""
        return by_tower(self.layers, lambda layer: layer.tower)

    def _rewrite_error(self) -> str:
        if not self.rewrite_error:
            return ""
        return f"the exact rewrites moved the float model's output by {self.rewrite_error:.1e}, relative"

    def _incoherence(self) -> str:
        """E.g. "incoherence of 46 linear weights: median 9.1 -> 5.0", and the largest: "58.6 (a.weight)", "10.2 (b.weight)"."""
        known = {fqn: pair for fqn, pair in self.incoherence.items() if all(map(math.isfinite, pair))}
        if not known:
            return ""
        medians, largest = [], []
        for i in (0, 1):
            worst = max(known, key=lambda fqn, i=i: known[fqn][i])
            medians.append(f"{statistics.median(pair[i] for pair in known.values()):.1f}")
            largest.append(f"{known[worst][i]:.1f} ({worst})")
        head = f"incoherence of {count(len(known), 'linear weight')}"
        lines = [f"{head}: median {' -> '.join(medians)}", f"  largest before {largest[0]}", f"  largest after  {largest[1]}"]
        return "\n".join(lines)

    def _worst(self) -> str:
        measured = sorted((layer for layer in self.layers if layer.sqnr), key=lambda layer: layer.worst_sqnr)
        if not measured:
            return ""
        worst = measured[:WORST]
        head = ("lowest SQNR", "scheme", "visual, dB", "text, dB")
        rows = [(x.fqn, x.scheme, *(decibels(x.sqnr.get(m), "") for m in MODALITIES)) for x in worst]
        lines = text_table(head, rows).splitlines()
        for layer, line in zip(worst, lines[1:], strict=True):
            done = ", ".join(layer.transforms)
            lines[lines.index(line)] = f"{line}\n  {done}" if done else line
        return "\n".join(lines)

    def _scores(self) -> str:
        """How far rounded keys spread the visual scores, and what calibration does about it; medians over the layers."""
        bits = self.config.kv.layer_bits if self.config.kv else ()
        own = [f"bits of the cache's layers: {' '.join(map(str, bits))}"] if bits else []
        if not self.kv_scores:
            return "\n".join(own)
        lines = [*own, f"scores of visual tokens in {count(len(self.kv_scores), 'layer')}, one calibration batch (medians)"]
        calibrated = any(CALIBRATED in layer.error for layer in self.kv_scores)
        for kind in (ROUNDED, CALIBRATED) if calibrated else (ROUNDED,):
            outside = statistics.median(layer.outside(kind) for layer in self.kv_scores)
            error = statistics.median(layer.error_of(kind) for layer in self.kv_scores)
            lines.append(f"  {kind}: {outside:.1%} beyond the exact scores, mean squared error of the softmax {error:.1e}")
        return "\n".join(lines)

    def _passes(self) -> str:
        rows = [
            (r["name"], "exact" if r["exact"] else "lossy", r["sites"], r["refused"], f"{r['ms']:.1f}")
            for r in map(_pass_row, self.passes)
        ]
        return text_table(("pass", "", "sites", "refused", "ms"), rows) if rows else ""

    def _refusals(self) -> str:
        return "\n".join(["refused", *(f"  {refusal}" for refusal in self.refused)]) if self.refused else ""


def _worded(scheme: Scheme) -> str:
    """The scheme, with the bits that its name does not tell."""
    return f"{scheme} ({scheme.weight.bits_with_scales:g} bits a weight)" if scheme.weight.float4 else str(scheme)


def plain(value: Any) -> Any:
    """``value`` as JSON data: tensors, arrays and tuples as lists, NaN and infinity as ``None``."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _pass_row(record: Any) -> dict[str, Any]:
    reasons = [str(miss) for miss in record.misses]
    return {
        "name": record.name,
        "exact": record.exact,
        "sites": record.n_sites,
        "refused": len(reasons),
        "reasons": reasons,
        "ms": record.ms,
    }


def transforms(prog: Program) -> dict[str, tuple[str, ...]]:
    """What the rewrites did to each weight, in words."""
    found: dict[str, list[str]] = {}
    for record_ in prog.records:
        for site in record_.sites if record_.name in FOLDED or record_.name == "insert_hadamard" else ():
            head, _, tail = site.partition(" -> ") if " -> " in site else site.partition(": ")
            if record_.name == "insert_hadamard":
                found.setdefault(head, []).append(f"online {tail}")
            else:
                for fqn in tail.split(", "):
                    found.setdefault(fqn, []).append(FOLDED[record_.name])
    for fqn, axes in prog.decided.rotated.items():
        found.setdefault(fqn, []).extend("rotated out" if axis == 0 else "rotated in" for axis in sorted(axes))
    for part in (p for s in prog.decided.scalings for p in s.parts):
        found.setdefault(part.fqn, []).append("channel scale in" if part.reads else "channel scale out")
    for fqn, axis in sorted(prog.decided.flipped):
        found.setdefault(fqn, []).append("signs out" if axis == 0 else "signs in")
    return {fqn: tuple(words) for fqn, words in found.items()}


def refusals(prog: Program) -> list[Refusal]:
    """Misses of all passes, but for rotations that a later online Hadamard made up for."""
    made_up = prog.decided.hadamards
    return [
        Refusal(fqn, m.node, f"{r.name}: {m.reason}")
        for r in prog.records
        for m in r.misses
        for fqn in m.fqn.split(", ")
        if not (r.name == "fuse_rotation" and fqn in made_up)
    ]
