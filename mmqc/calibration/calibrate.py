"""Streaming statistics of every linear's input, per modality, from live forwards of the model.

Hooks see each batch once and keep only what the scheme needs: the range, for percentiles a logarithmic histogram of
magnitudes (1 % resolution), for GPTQ the second moment XᵀX (moments.py).  Whose forward runs, the whole model's or one
block's (stream.py), makes no difference to a hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mmqc.calibration.moments import add_drift, add_second_moment, mirror_
from mmqc.config import ActivationSpec, WeightSpec
from mmqc.errors import MmqcError
from mmqc.nn.modality import ModalityContext
from mmqc.ops.quantize import LARGEST

TEXT, VISUAL, MIXED = "text", "visual", "mixed"
EQUAL = {TEXT: 1.0, VISUAL: 1.0, MIXED: 1.0}
_BINS_PER_OCTAVE, _LOWEST = 64, -40
_BINS = 80 * _BINS_PER_OCTAVE
FEW_BITS = 2


def is_few_bits(weight: WeightSpec) -> bool:
    """Whether weights are rounded by GPTQ to so few bits that it matters for which rows."""
    return weight.solver == "gptq" and weight.bits <= FEW_BITS


class RowWeights(NamedTuple):
    """What a row of each modality counts: in second moments for GPTQ in ``FEW_BITS``, and in every other sum over rows."""

    few_bits: Mapping[str, float] = EQUAL
    others: Mapping[str, float] = EQUAL

    def of(self, weight: WeightSpec) -> Mapping[str, float]:
        """In what the solver of such weights is given."""
        return self.few_bits if is_few_bits(weight) else self.others


ALIKE = RowWeights()


class CalibrationError(MmqcError, ValueError):
    """The calibration data cannot be used: says what is missing and what to pass instead."""


@dataclass
class Range:
    """Smallest and largest value seen, and how many; the histogram counts magnitudes by their logarithm.

    ``ends`` are smallest and largest on the device until ``settle``: to look at them means to wait for it.
    """

    low: float = float("inf")
    high: float = float("-inf")
    count: int = 0
    histogram: Tensor | None = None
    ends: Tensor | None = None

    def update(self, x: Tensor, histogram: bool) -> None:
        """Take in the values of ``x``."""
        if not x.numel():
            return
        low, high = torch.aminmax(x)
        ends = torch.stack((-low, high))
        self.ends = ends if self.ends is None else torch.maximum(self.ends, ends)
        self.count += x.numel()
        if histogram:
            octave = x.abs().float().clamp(min=2.0**_LOWEST).log2() - _LOWEST
            bins = (octave * _BINS_PER_OCTAVE).long().clamp(max=_BINS - 1)
            counted = torch.bincount(bins.flatten().cpu(), minlength=_BINS)
            self.histogram = counted if self.histogram is None else self.histogram + counted

    def settle(self) -> None:
        """All values are in."""
        if self.ends is not None:
            low, high = self.ends.tolist()
            self.low, self.high, self.ends = min(self.low, -low), max(self.high, high), None

    def scale(self, spec: ActivationSpec) -> float:
        """S = max(|min| / 2^(b-1), |max| / (2^(b-1) - 1)), max|x| / 448 for float8; percentiles cut both ends at one magnitude."""
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        if spec.observer == "percentile" and self.histogram is not None:
            share = self.histogram.cumsum(0).double() / self.histogram.sum()
            index = int((share < spec.percentile).sum())
            limit = 2.0 ** ((index + 1) / _BINS_PER_OCTAVE + _LOWEST)
            low, high = max(low, -limit), min(high, limit)
        top = 2 ** (spec.bits - 1)
        scale = max(-low, high) / LARGEST if spec.type == "float" else max(-low / top, high / (top - 1))
        return scale if scale > 0 else 1.0


@dataclass
class InputStatistics:
    """What one linear's input looked like.

    Attributes:
        ranges: by modality.
        hessian: the second moment, float64 [K, K]; complete after ``finish``.
        rows: how many rows are in it.
        drift: Σ a_m (X - Y)_mᵀ Y_m, float64 [K, K], of the same rows Y and what the floating-point model feeds the linear, X.
        paired: whether there was such an X for each Y.
        row_weights: what a row of each modality counts there, and has to count in any other loss over rows.
    """

    ranges: dict[str, Range] = field(default_factory=lambda: {TEXT: Range(), VISUAL: Range(), MIXED: Range()})
    hessian: Tensor | None = None
    rows: int = 0
    drift: Tensor | None = None
    paired: bool = False
    row_weights: Mapping[str, float] = field(default_factory=lambda: dict(EQUAL))

    def finish(self) -> InputStatistics:
        """All batches are in."""
        if self.hessian is not None:
            mirror_(self.hessian)
        for seen in self.ranges.values():
            seen.settle()
        return self

    def add_moment(self, parts: Mapping[str, Tensor], rows: Tensor) -> None:
        """Take the rows [M, K] into the second moment; ``parts`` are the same rows by modality."""
        for weight, group in weighted(parts, self.row_weights, rows):
            self.hessian = add_second_moment(self.hessian, group, weight)
        self.rows += len(rows)

    def scales(self, spec: ActivationSpec, language: bool) -> list[float] | None:
        """[text, visual] for MSQ in the language model, else one scale; None if no input was seen.

        Rows that are not the call's tokens (those routed to an expert, a decoder's behind an encoder) have no modality: one
        scale then, as for a linear that met one modality only.
        """
        seen = {name: r for name, r in self.ranges.items() if r.count}
        if not seen:
            return None
        if spec.per_modality and language and seen.keys() == {TEXT, VISUAL}:
            return [seen[TEXT].scale(spec), seen[VISUAL].scale(spec)]
        return [max(r.scale(spec) for r in seen.values())]


@dataclass(frozen=True)
class Watch:
    """What to keep of one linear's input, and whether its rows are the language model's tokens."""

    language: bool
    spec: ActivationSpec | None
    hessian: bool
    skip: Tensor | None = None
    row_weights: Mapping[str, float] = field(default_factory=lambda: dict(EQUAL))


def by_modality(x: Tensor, language: bool, context: ModalityContext | None) -> dict[str, Tensor]:
    """The rows of x [*, K] split by modality; vision tower and projector are visual throughout.

    Rows that are not the tokens of the call (experts see some, in another order) are ``MIXED``.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not language:
        return {VISUAL: rows}
    if context is None or context.visual is None:
        return {TEXT: rows}
    if len(rows) != context.visual.numel():
        return {MIXED: rows}
    visual, text = context.places()
    return {VISUAL: rows[visual], TEXT: rows[text]}


def weighted(parts: Mapping[str, Tensor], row_weights: Mapping[str, float], rows: Tensor) -> list[tuple[float, Tensor]]:
    """(weight, rows) by modality; all rows at once where their weights are equal, ``parts`` being the same rows."""
    weights = {row_weights.get(name, 1.0) for name in parts}
    if len(weights) == 1:
        return [(weights.pop(), rows)]
    return [(row_weights.get(name, 1.0), part) for name, part in parts.items()]


def weighted_rows(
    x: Tensor, language: bool, context: ModalityContext | None, row_weights: Mapping[str, float]
) -> list[tuple[float, Tensor]]:
    """(weight, rows) of x [*, K], told apart only if weights differ: to find the visual rows is to wait for the device."""
    rows, weights = x.reshape(-1, x.shape[-1]), {row_weights.get(name, 1.0) for name in EQUAL}
    return [(weights.pop(), rows)] if len(weights) == 1 else weighted(by_modality(x, language, context), row_weights, rows)


class Observer:
    """One linear's statistics, gathered in ``seen``.

    Args:
        watch: what to keep.
        context: tells visual from text rows.
        paired: ``expect`` is called with the same rows of the floating-point model before ``update``.
    """

    def __init__(self, watch: Watch, context: ModalityContext | None, paired: bool = False) -> None:
        self.watch, self.context = watch, context
        self.seen = InputStatistics(row_weights=watch.row_weights, paired=paired and watch.hessian)
        self.expected: list[Tensor] = []

    def expect(self, x: Tensor) -> None:
        """One call's input in the floating-point model; ``update`` is told the same calls in the same order."""
        if self.seen.paired:
            self.expected.append(x.clone())  # the model may write to it before it is asked for

    def update(self, x: Tensor) -> None:
        """Take in one call's input, what the weight multiplies."""
        given = x
        if self.watch.skip is not None:
            x = x.index_fill(-1, self.watch.skip.to(x.device), 0)
        spec = self.watch.spec
        parts = by_modality(x, self.watch.language, self.context)
        for name, rows in parts.items():
            self.seen.ranges[name].update(rows, spec is not None and spec.observer == "percentile")
        if self.watch.hessian:
            self.seen.add_moment(parts, x.reshape(-1, x.shape[-1]))
        if self.seen.paired:
            self._pair(given, parts, x)

    def _pair(self, given: Tensor, parts: Mapping[str, Tensor], x: Tensor) -> None:
        """Take one call into the drift; rows that are routed may be other tokens' in the other model, and are not compared."""
        wanted = self.expected.pop(0) if self.expected else None
        if wanted is None or wanted.shape != x.shape or MIXED in parts:
            self.seen.paired, self.seen.drift = False, None
            return
        weights = self.seen.row_weights
        errors = weighted_rows(wanted - given, self.watch.language, self.context, weights)
        rows = weighted_rows(x, self.watch.language, self.context, weights)
        for (weight, error), (_, group) in zip(errors, rows, strict=True):
            self.seen.drift = add_drift(self.seen.drift, error, group, weight)
