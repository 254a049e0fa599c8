"""What was left in floating point, by name and with a reason; and the error where that is everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import nn

from mmqc.checkpoint.linear_like import looks_linear
from mmqc.config import QuantConfig
from mmqc.errors import MmqcError
from mmqc.passes.assign_scheme import KEPT
from mmqc.quantization.job import Job
from mmqc.quantization.stand_ins import StandIns, step_back
from mmqc.quantization.units import Quantized
from mmqc.report.report import Refusal

KINDS = 8


class NothingQuantizedError(MmqcError, ValueError):
    """The config asks for quantized weights and no weight could be quantized; the model is as it was."""


def complete(job: Job, found: StandIns, quantized: Quantized) -> Quantized:
    """Give relatives of linears that stayed floats their modules back, and name all that was left out.

    Raises:
        NothingQuantizedError: nothing was quantized, and that is not allowed.
    """
    back = step_back(job.model, job.journal, found, quantized.layers)
    refused = (*_left_out(job, found, quantized), *back)
    if not job.request.allow_nothing:
        require_some(job.model, job.request.config, quantized.layers, refused)
    return dataclasses.replace(quantized, refused=refused)


def _left_out(job: Job, found: StandIns, quantized: Quantized) -> list[Refusal]:
    """What was refused so far, and every other linear that stays in floating point although it has a scheme."""
    wanted, known, done = job.request.filter_fn, quantized.refused, quantized.layers
    assert quantized.rewritten is not None
    if not job.request.config.schemes:
        return [*known]
    kept = {r.fqn for r in known if KEPT in r.reason}
    own = {fqn: why for fqn, why in found.refused.items() if fqn not in kept}
    refused = [r for r in known if r.fqn not in own or not r.reason.startswith("assign_scheme")]
    refused += [Refusal(fqn, "", why) for fqn, why in own.items()]
    named = {r.fqn.removesuffix(".weight") for r in refused} | {layer.fqn for layer in done}
    for fqn, module in job.model.named_modules():
        if fqn in named or not looks_linear(module):
            continue
        if fqn not in quantized.rewritten.program.called:
            refused.append(Refusal(fqn, "", "no recorded batch reached it"))
        elif wanted is not None and not wanted(module, fqn):
            refused.append(Refusal(fqn, "", "filter_fn leaves it out"))
    return refused


def require_some(model: nn.Module, config: QuantConfig, layers: Iterable[object], refused: Sequence[Refusal]) -> None:
    """Raise if there is no layer although the config has schemes.

    Raises:
        NothingQuantizedError: names the kinds of modules and why each was left out.
    """
    if any(True for _ in layers) or not config.schemes:
        return
    modules, kinds = dict(model.named_modules()), {}
    stacks = {name for name, p in model.named_parameters() if p.dim() == 3}
    for refusal in refused:
        fqn = refusal.fqn.removesuffix(".weight")
        if fqn in modules and looks_linear(modules[fqn]):
            kinds.setdefault((type(modules[fqn]).__name__, refusal.reason), []).append(fqn)
        elif refusal.fqn in stacks:
            kinds.setdefault(("stack of experts", refusal.reason), []).append(refusal.fqn)
    lines = [f"{len(names)} {kind}, e.g. {names[0]}: {why}" for (kind, why), names in kinds.items()][:KINDS]
    towers = ", ".join(config.schemes)
    lines = lines or [f"{type(model).__name__} has no module that computes x Wᵀ + b in what the config quantizes ({towers})"]
    raise NothingQuantizedError(
        "nothing would be quantized, and the model is as it was:\n  " + "\n  ".join(lines) + "\n"
        "change keep or filter_fn, or pass allow_nothing=True if that is what you want"
    )
