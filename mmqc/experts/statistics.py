"""What each expert's inputs looked like: ranges per expert and modality, and where the solver needs it a second moment per expert.

    low, high[e, m] = extremes of the rows routed to expert e of modality m          H_e = sum over its rows of a_m x xᵀ

A row that is zero throughout is not routed: where every expert computes every token, the router multiplies by zero instead.
Experts with few rows have no range to go by: theirs is that of all experts' rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import _BINS, _BINS_PER_OCTAVE, _LOWEST, ALIKE, EQUAL, MIXED, TEXT, VISUAL, Range, RowWeights
from mmqc.calibration.observe import Call, observe
from mmqc.config import ActivationSpec, Scheme
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.experts.call import BATCHED, Rows
from mmqc.experts.find import ExpertLayer, Stack, multiplier
from mmqc.nn.modality import ModalityContext

MODALITIES = (TEXT, VISUAL, MIXED)
ENOUGH_ROWS = 16  # for a static scale of an expert's own


class StackStatistics:
    """The inputs of one stack, over E experts and the modalities text, visual and mixed.

    Attributes:
        rows: int64 [E, 3].
        low, high: float32 [E, 3]; infinities where there was no row.
        histogram: int64 [E, 3, bins] of magnitudes, for percentiles.
        hessian: float64 [E, K, K].
    """

    def __init__(self, experts: int, spec: ActivationSpec | None, hessian: bool, row_weights: Mapping[str, float] = EQUAL) -> None:
        self.spec, self.wants_hessian = spec, hessian
        self.row_weights = [row_weights.get(name, 1.0) for name in MODALITIES]  # a_m
        self.rows = torch.zeros(experts, 3, dtype=torch.int64)
        self.low = torch.full((experts, 3), float("inf"))
        self.high = torch.full((experts, 3), float("-inf"))
        self.histogram: Tensor | None = None
        self.hessian: Tensor | None = None

    def update(self, x: Tensor, rows: Rows, modality: Tensor) -> None:
        """Take in rows x [S, K] of the modalities [S]."""
        experts = self.rows.shape[0]
        there = (x != 0).any(-1) & (torch.arange(len(x), device=x.device) < rows.offsets[-1])
        place = (rows.experts() * 3 + modality)[there]
        values = x[there].float()
        self.rows += torch.bincount(place, minlength=experts * 3).view(experts, 3).cpu()
        if len(values):
            low, high = torch.aminmax(values, dim=-1)
            for kept, seen, how in ((self.low, low, "amin"), (self.high, high, "amax")):
                kept.view(-1).scatter_reduce_(0, place.cpu(), seen.cpu(), how)
        if self.spec is not None and self.spec.observer == "percentile":
            octave = values.abs().clamp(min=2.0**_LOWEST).log2() - _LOWEST
            bins = (octave * _BINS_PER_OCTAVE).long().clamp(max=_BINS - 1) + place[:, None] * _BINS
            counted = torch.bincount(bins.flatten().cpu(), minlength=experts * 3 * _BINS).view(experts, 3, _BINS)
            self.histogram = counted if self.histogram is None else self.histogram + counted
        if self.wants_hessian:
            self._update_hessian(x.float(), modality, rows.offsets.tolist())

    def _update_hessian(self, x: Tensor, modality: Tensor, bounds: list[int]) -> None:
        if self.hessian is None:
            width = x.shape[1]
            self.hessian = torch.zeros(len(bounds) - 1, width, width, dtype=torch.float64, device=x.device)
        weight = torch.tensor(self.row_weights, dtype=torch.float64, device=x.device)[modality, None]
        for e, (start, end) in enumerate(itertools.pairwise(bounds)):
            if start < end:
                part = x[start:end].double()
                self.hessian[e] += part.T @ (part * weight[start:end])

    def join(self, ranks: Ranks) -> None:
        """Take in what the other ranks saw."""
        sums = {"rows": self.rows, "histogram": self.histogram, "hessian": self.hessian}
        found = ranks.summed({name: part for name, part in sums.items() if part is not None})
        self.rows, self.histogram, self.hessian = found["rows"], found.get("histogram"), found.get("hessian")
        ends = ranks.largest({"low": -self.low, "high": self.high})
        self.low, self.high = -ends["low"], ends["high"]

    def seen(self) -> Tensor:
        """Rows of each expert, int64 [E]."""
        return self.rows.sum(1)

    def range(self, experts: Iterable[int], modalities: Iterable[int]) -> Range:
        """The range over some experts and modalities."""
        e, m = torch.tensor(list(experts)), torch.tensor(list(modalities))
        part = lambda t: t[e][:, m]  # noqa: E731
        histogram = None if self.histogram is None else part(self.histogram).sum((0, 1))
        return Range(float(part(self.low).min()), float(part(self.high).max()), int(part(self.rows).sum()), histogram)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """(low, high) by modality, over all experts."""
        everyone = range(len(self.rows))
        found = {name: self.range(everyone, [i]) for i, name in enumerate(MODALITIES)}
        return {name: (r.low, r.high) for name, r in found.items() if r.count}

    def scales(self, spec: ActivationSpec, language: bool) -> Tensor | None:
        """Float32 [E, 2] = (text, visual) for MSQ in the language model, else [E, 1]; None if no row was seen."""
        everyone, total = range(len(self.rows)), self.rows.sum(0).tolist()
        if not any(total):
            return None
        own = spec.per_modality and language and total[0] > 0 and total[1] > 0 and total[2] == 0
        columns: list[list[float]] = []
        for modalities in ([0], [1]) if own else ([0, 1, 2],):
            shared = self.range(everyone, modalities).scale(spec)
            enough = self.rows[:, modalities].sum(1) >= ENOUGH_ROWS
            columns.append([self.range([e], modalities).scale(spec) if enough[e] else shared for e in everyone])
        return torch.tensor(columns, dtype=torch.float32).T.contiguous()

    def note(self, static: bool) -> str:
        """What experts without rows, or with few, got instead of what was asked for."""
        seen = self.seen()
        none, few = int((seen == 0).sum()), int(((seen > 0) & (seen < ENOUGH_ROWS)).sum())
        parts = []
        if none:
            what = ["rounded to nearest"] if self.wants_hessian else []
            what += ["the input scale of all experts"] if static else []
            parts.append(f"{none} of {len(seen)} experts saw no token" + (f": {', '.join(what)}" if what else ""))
        if few and static:
            parts.append(f"{few} saw fewer than {ENOUGH_ROWS} rows: the input scale of all experts")
        return "; ".join(parts)


@dataclass(frozen=True)
class Observed:
    """A module of experts to observe, its scheme and its tower."""

    layer: ExpertLayer
    scheme: Scheme
    tower: str

    @property
    def language(self) -> bool:
        """Whether its rows are the language model's."""
        return self.tower == "language"

    @property
    def needs_data(self) -> bool:
        """Whether anything of its scheme depends on its inputs."""
        return self.scheme.activation is not None or self.scheme.weight.needs_hessian


def _modality(observed: Observed, rows: Rows, x: Tensor, context: ModalityContext | None) -> Tensor:
    """0, 1 or 2 for every row: text, visual, or not a token of the call."""
    like = torch.zeros(len(rows.x), dtype=torch.long, device=x.device)
    if not observed.language:
        return like + 1
    if context is None or context.visual is None:
        return like
    tokens = x.shape[:-1].numel() // (observed.layer.call.experts if observed.layer.call.form == BATCHED else 1)
    if rows.tokens is None or tokens != context.visual.numel():
        return like + 2
    visual = observed.layer.call.visual(rows, x, context)
    return like if visual is None else visual.long()


Transform = Callable[[Stack, Tensor], Tensor]


@torch.no_grad()
def expert_statistics(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    watched: Iterable[Observed],
    context: ModalityContext | None,
    transform: Transform,
    row_weights: RowWeights = ALIKE,
    ranks: Ranks = ALONE,
) -> dict[str, StackStatistics]:
    """Run the batches and return what every stack's inputs looked like, by the parameter's name.

    Args:
        model: in floating point.
        batches: keyword batches, those of this rank.
        watched: the modules to observe.
        context: tells visual from text rows; attached to ``model``.
        transform: what a stack's weight multiplies, of what it is given (an online Hadamard's output).
        row_weights: what a row of each modality counts.
        ranks: who sees the other batches.
    """
    found: dict[str, StackStatistics] = {}
    multiply = multiplier(model)

    def update(each: Observed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        modality: list[Tensor] = []

        def product(stack: Stack, x: Tensor, rows: Rows) -> Tensor:
            if not modality:
                modality.append(_modality(each, rows, each.layer.call.x(args, kwargs), context))
            found[stack.fqn].update(transform(stack, x), rows, modality[0])
            return multiply(stack, x, rows)

        each.layer.run(args, kwargs, product)

    places = {}
    for each in watched:
        weight, experts = each.scheme.weight, each.layer.call.experts
        for stack in each.layer.stacks:
            weights = row_weights.of(weight)
            found[stack.fqn] = StackStatistics(experts, each.scheme.activation, weight.needs_hessian, weights)
        places[Call(each.layer.module)] = partial(update, each)
    with observe(model, places):
        for batch in batches:
            model(**batch)
    for statistics in found.values():
        statistics.join(ranks)
    return found
