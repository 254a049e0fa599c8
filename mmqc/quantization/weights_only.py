"""Weight-only quantization without data: every ``nn.Linear`` module, no recording, no rewrites.

Used by ``quantize_`` when no calibration is given and none is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from mmqc.checkpoint.data_free import quantized_linear, select
from mmqc.checkpoint.hf import attach_config
from mmqc.config import QuantConfig, Scheme
from mmqc.quantization.convert import Journal, size_of
from mmqc.report.report import LayerReport, QuantReport


def quantize_weights_only(
    model: nn.Module, config: QuantConfig, scheme: Scheme, filter_fn: Callable[[nn.Module, str], bool] | None, device: Any = None
) -> QuantReport:
    """Swap every linear but those that ``keep`` names.

    Weights are rounded on ``device``; None means where they are.

    Raises:
        ConfigError: a ``keep`` pattern that matches nothing.
    """
    chosen = select(model, config, scheme, filter_fn)
    report = QuantReport(config, refused=chosen.refused, size_before=size_of(model))
    with Journal(model) as journal:
        for fqn, own in chosen.schemes.items():
            report.layers.append(_swap(journal, fqn, own, device))
        report.size_after = size_of(model)
        attach_config(model, config, {"passes": [], "untied": []})
    return report


def _swap(journal: Journal, fqn: str, scheme: Scheme, device: Any) -> LayerReport:
    start = time.perf_counter()
    linear = journal.model.get_submodule(fqn)
    assert isinstance(linear, nn.Linear)
    home = linear.weight.device
    weight = linear.weight.detach().to(home if device is None else device)
    new, solved = quantized_linear(weight, linear.bias, scheme, fqn)
    error = float((weight.float() - solved.dequantize()).norm() / weight.float().norm())
    journal.swap(fqn, new.to(home))
    return LayerReport(fqn, "", "", str(scheme), weight_error=error, seconds=time.perf_counter() - start, note=solved.note)
