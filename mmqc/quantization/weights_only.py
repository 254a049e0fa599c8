"""Weight-only quantization without data: every linear module, no recording, no rewrites."""

from __future__ import annotations

import time
from typing import Any

from mmqc.calibration.calibrate import CalibrationError
from mmqc.checkpoint.data_free import quantized_linear, select
from mmqc.checkpoint.linear_like import read_linear
from mmqc.config import Scheme
from mmqc.quantization.convert import Journal
from mmqc.quantization.job import Job
from mmqc.quantization.left_out import require_some
from mmqc.quantization.stand_ins import drop_computing
from mmqc.quantization.units import Quantized
from mmqc.report.report import LayerReport


def quantize_without_data(job: Job) -> Quantized:
    """Swap every linear but those that ``keep`` names; none where only the cache is to be packed.

    Weights are rounded on the request's device; None means where they are.

    Raises:
        CalibrationError: the towers have different schemes.
        ConfigError: a ``keep`` pattern that matches nothing.
        NothingQuantizedError: every linear is left out.
    """
    request, config = job.request, job.request.config
    if not request.changes_weights:
        return Quantized(config)
    schemes = {scheme for place, scheme in config.schemes.items() if place != "head"}
    if len(schemes) != 1:
        raise CalibrationError(
            "the towers have different schemes: pass one calibration batch, so that the towers can be told apart"
        )
    chosen = select(job.model, config, schemes.pop(), request.filter_fn)
    if not request.allow_nothing:
        require_some(job.model, config, chosen.schemes, chosen.refused)
    layers = (_swap(job.journal, fqn, own, request.device) for fqn, own in chosen.schemes.items())
    return Quantized(config, tuple(layers), tuple(chosen.refused))


def _swap(journal: Journal, fqn: str, scheme: Scheme, device: Any) -> LayerReport:
    start = time.perf_counter()
    linear = journal.model.get_submodule(fqn)
    read = read_linear(linear)
    home = read.weight.device
    weight = read.weight.detach().to(home if device is None else device)
    new, solved = quantized_linear(weight, read.bias, scheme, fqn)
    error = float((weight.float() - solved.dequantize()).norm() / weight.float().norm())
    drop_computing(linear, journal)
    journal.swap(fqn, new.to(home))
    note = "; ".join(filter(None, (solved.note, read.note)))
    return LayerReport(fqn, "", "", str(scheme), weight_error=error, seconds=time.perf_counter() - start, note=note)
