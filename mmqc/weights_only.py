"""Weight-only quantization without data: every ``nn.Linear`` module, no recording, no rewrites.

Used by ``quantize_`` when no calibration is given and none is needed, and by torchao's ``quantize_`` for our configs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from .config import HEAD, ConfigError, QuantConfig, Scheme
from .convert import Journal, size_of
from .hf import attach_config
from .modules import QuantLinear
from .passes.assign_scheme import kept
from .report import LayerReport, QuantReport, Refusal
from .solvers import solve


def quantize_weights_only(
    model: nn.Module, config: QuantConfig, scheme: Scheme, filter_fn: Callable[[nn.Module, str], bool] | None
) -> QuantReport:
    """Swap every linear but those that ``keep`` names; the output head is known by ``get_output_embeddings``.

    Raises:
        ConfigError: a ``keep`` pattern that matches nothing.
    """
    output_head: Any = getattr(model, "get_output_embeddings", None)
    head = output_head() if output_head is not None else None
    report = QuantReport(config, size_before=size_of(model))
    used: set[str] = set()
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    with Journal(model) as journal:
        for fqn, linear in linears.items():
            role = "head" if linear is head else ""
            chosen = config.head if role and config.head is not None else scheme
            pattern = next((p for p in config.keeps(role) if kept(p, fqn, role)), None)
            if pattern is not None:
                used.add(pattern)
                report.refused.append(Refusal(fqn, "", f"kept in floating point ({pattern})"))
            elif filter_fn is None or filter_fn(linear, fqn):
                report.layers.append(_swap(journal, fqn, linear, chosen))
        unused = [p for p in config.keep if p not in used and p != HEAD]
        if unused:
            raise ConfigError(
                f"keep pattern {unused[0]!r} matches no linear of this model; some of its linears: {list(linears)[:5]}"
            )
        report.size_after = size_of(model)
        attach_config(model, config, {"passes": [], "untied": []})
    return report


def _swap(journal: Journal, fqn: str, linear: nn.Linear, scheme: Scheme) -> LayerReport:
    start = time.perf_counter()
    solved = solve(linear.weight.detach().float(), scheme.weight, name=fqn)
    new = QuantLinear.from_parts(
        solved.codes, solved.scale, weight_zero=solved.zero, weight_bits=scheme.weight.bits, group_size=scheme.weight.group_size,
        bias=None if linear.bias is None else linear.bias.detach(), dtype=linear.weight.dtype,
    )  # fmt: skip
    error = float((linear.weight.detach().float() - solved.dequantize()).norm() / linear.weight.detach().float().norm())
    journal.swap(fqn, new)
    return LayerReport(
        fqn, "", "", str(scheme), weight_error=error, seconds=time.perf_counter() - start, note=solved.note
    )
