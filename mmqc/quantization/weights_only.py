"""Weight-only quantization without data: every linear module, no recording, no rewrites."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmqc.calibration.calibrate import CalibrationError
from mmqc.checkpoint.data_free import quantized_linear, select, tower_schemes
from mmqc.checkpoint.linear_like import read_linear
from mmqc.config import Scheme
from mmqc.quantization.convert import Journal
from mmqc.quantization.job import Job
from mmqc.quantization.left_out import require_some
from mmqc.quantization.stand_ins import drop_computing
from mmqc.quantization.units import Quantized
from mmqc.report.report import LayerReport
from mmqc.solvers import Quantized as Rounded
from mmqc.solvers import solve

TOGETHER = 4  # linears of a rank that are solved before the ranks exchange them
Solution = tuple[Rounded, float]


def quantize_without_data(job: Job) -> Quantized:
    """Swap every linear but those that ``keep`` names; none where only the cache is to be packed.

    Weights are rounded on the request's device; None means where they are.  Of several ranks each rounds its part.

    Raises:
        CalibrationError: the towers have different schemes, or one has none.
        ConfigError: a ``keep`` pattern that matches nothing.
        NothingQuantizedError: every linear is left out.
    """
    request, config = job.request, job.request.config
    if not request.changes_weights:
        return Quantized(config)
    schemes = tower_schemes(config, job.model)
    scheme = schemes.pop()
    if schemes or scheme is None:
        raise CalibrationError(
            "the towers have different schemes, or one is to stay in floating point, and without data nobody can tell: pass "
            "calibration=[batch], one with an image"
        )
    chosen = select(job.model, config, scheme, request.filter_fn)
    if not request.allow_nothing:
        require_some(job.model, config, chosen.schemes, chosen.refused)
    return Quantized(config, tuple(_layers(job, chosen.schemes)), tuple(chosen.refused))


def _layers(job: Job, schemes: Mapping[str, Scheme]) -> Iterator[LayerReport]:
    """Some linears at a time: solved by their ranks, swapped by all."""
    names, step = [*schemes], TOGETHER * job.ranks.size
    for part in (names[start : start + step] for start in range(0, len(names), step)):
        found: Sequence[Solution | None] = [None] * len(part)
        if job.ranks.size > 1:
            found = job.ranks.collected([_solution(job, fqn, schemes[fqn]) for fqn in job.ranks.mine(part)])
        for fqn, known in zip(part, found, strict=True):
            yield _swap(job.journal, fqn, schemes[fqn], job.request.device, known)


def _solution(job: Job, fqn: str, scheme: Scheme) -> Solution:
    """What ``_swap`` would find, and the seconds that it took."""
    start = time.perf_counter()
    weight = read_linear(job.model.get_submodule(fqn)).weight.detach()
    weight = weight if job.request.device is None else weight.to(job.request.device)
    return solve(weight.float(), scheme.weight, name=fqn), time.perf_counter() - start


def _swap(journal: Journal, fqn: str, scheme: Scheme, device: Any, known: Solution | None) -> LayerReport:
    start = time.perf_counter() - (known[1] if known else 0.0)
    linear = journal.model.get_submodule(fqn)
    read = read_linear(linear)
    home = read.weight.device
    weight = read.weight.detach().to(home if device is None else device)
    new, solved = quantized_linear(weight, read.bias, scheme, fqn, known[0] if known else None)
    error = float((weight.float() - solved.dequantize()).norm() / weight.float().norm())
    drop_computing(linear, journal)
    journal.swap({fqn: new.to(home)})
    note = "; ".join(filter(None, (solved.note, read.note)))
    return LayerReport(fqn, "", "", str(scheme), weight_error=error, seconds=time.perf_counter() - start, note=note)
