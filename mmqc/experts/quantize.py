"""``quantize_`` of the experts of a mixture: find their modules, observe their inputs, solve per expert, build, measure.

    per expert e and stack:  (codes, scale, zero)[e] = solve(W_e [Hᵀ], hessian = H_e),  s_x[e] from the rows routed to e

Experts that saw no token are rounded to nearest where the solver needs data, and take the input scale of all experts.
Of several ranks each runs its part of the batches, and solves its part of a stack's experts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration import joined
from mmqc.calibration.calibrate import ALIKE, RowWeights, by_modality
from mmqc.calibration.measure import Loss
from mmqc.calibration.observe import Output, observe
from mmqc.config import QuantConfig, Scheme, WeightSpec
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.experts.find import ExpertLayer, Stack, dense, find_experts, products
from mmqc.experts.modules import QuantExperts, QuantStack
from mmqc.experts.statistics import Observed, StackStatistics, expert_statistics
from mmqc.graph.program import Program
from mmqc.nn.modality import ModalityContext
from mmqc.ops.hadamard import apply_factors
from mmqc.ops.hadamard_matrix import hadamard_factors, hadamard_kind
from mmqc.ops.pack import pack
from mmqc.passes.assign_scheme import KEPT, kept
from mmqc.report.report import LayerReport, Refusal, transforms
from mmqc.solvers import solve

MEMORY = 16e9  # bytes of second moments that are held at once; with more, the calibration data run through the model again
TOGETHER = 8  # experts of a rank that are solved before the ranks exchange them
Batches = Callable[[], Iterable[Mapping[str, Any]]]


@dataclass
class BuiltExperts:
    """The modules to swap in, and what to say about them.

    Attributes:
        modules: by FQN.
        layers: one entry per stack.
        refused: stacks that stay in floating point.
        known: names of every stacked parameter; what other passes refused about them is dropped.
    """

    modules: dict[str, QuantExperts] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    known: set[str] = field(default_factory=set)


@torch.no_grad()
def quantize_experts(
    model: nn.Module,
    prog: Program,
    config: QuantConfig,
    batches: Batches,
    measured: Batches,
    *,
    context: ModalityContext | None,
    wanted: Callable[[nn.Module, str], bool] | None = None,
    row_weights: RowWeights = ALIKE,
    ranks: Ranks = ALONE,
) -> BuiltExperts:
    """Quantized experts for ``model``, which is not changed.

    Args:
        model: in floating point, exact rewrites written.
        prog: its recording; linears carry their tower.
        config: the recipe.
        batches: this rank's calibration data as keyword arguments of a forward; called once, or more often where the second
            moments of all experts, which GPTQ and AWQ's clip need, would take more than ``MEMORY``.
        measured: the data that the result is measured on, all of them on every rank.
        context: tells visual from text rows; attached to ``model``.
        wanted: torchao's ``filter_fn``.
        row_weights: what a row of each modality counts.
        ranks: the processes that share the batches and the experts.
    """
    words = transforms(prog)
    built = BuiltExperts(known={fqn for uses in products(prog).values() for fqn in uses})
    if not built.known or not config.schemes:
        built.known.clear()
        return built
    layers, refused = find_experts(model, prog, next(iter(measured())))
    built.refused = [Refusal(*entry) for entry in refused]
    chosen = list(_chosen(model, prog, config, layers, wanted, built))
    behind = {layer.down.fqn for layer in layers if layer.down is not None and config.rewrites.hadamard}
    transform = _Transform(behind)
    for part in _parts(model, chosen):
        needed = [each for each in part if each.needs_data]
        seen = expert_statistics(model, batches(), needed, context, transform, row_weights, ranks) if needed else {}
        for each in part:
            _build(model, each, seen, transform, context, built, ranks)
    own = ranks.mine(list(measured())) if built.modules else []
    losses = joined.losses(ranks, _measure(model, own, built.modules, {e.layer.module: e.language for e in chosen}, context))
    for row in built.layers:
        folded = tuple(w for w in words.get(row.fqn, ()) if not w.startswith("rotated"))
        row.transforms = (*folded, *_rotations(prog, row.fqn, layers), *row.transforms)
        row.note = "; ".join(filter(None, (row.note, _factors(config, folded), _unlike_linears(config, row.tower))))
        row.sqnr = losses[next(m for m in built.modules if row.fqn.startswith(f"{m}."))].sqnr()
    return built


def _factors(config: QuantConfig, words: tuple[str, ...]) -> str:
    """What the search for factors per channel did not look at: its linears are modules, and stacks are not."""
    if config.rewrites.scales is None and config.rewrites.smooth is None:
        return ""
    if "channel scale in" in words:
        return "the factors of its input channels are those of the linears that read them too"
    return "no factors of its input channels were searched"


def _unlike_linears(config: QuantConfig, tower: str) -> str:
    """What is said of stacks whose linears beside them have dynamic activations, or float codes."""
    scheme = config.scheme(tower)
    if scheme is not None and (scheme.dynamic is not None or scheme.by_token):
        return "weight-only: experts' inputs are not quantized token by token, and all channels have the same bits"
    if scheme is not None and scheme.weight.float4:
        return f"integers in the same groups: grouped_matmul has no {scheme.weight.type} form"
    return "integers: grouped_matmul has no float8 form" if scheme is not None and scheme.float8 else ""


def _for_experts(scheme: Scheme) -> Scheme:
    """The same, as far as experts have it."""
    weight, activation = dataclasses.replace(scheme.weight, type="int"), scheme.activation
    return Scheme(weight, None if activation is None or scheme.by_token else dataclasses.replace(activation, type="int"))


def _rotations(prog: Program, fqn: str, layers: Iterable[ExpertLayer]) -> Iterator[str]:
    """Which sides of a stack were rotated, in the report's words."""
    stack = next(s for layer in layers for s in layer.stacks if s.fqn == fqn)
    for axis in sorted(prog.decided.rotated.get(fqn, {})):
        yield "rotated in" if axis == (1 if stack.transposed else 2) else "rotated out"


def _chosen(
    model: nn.Module, prog: Program, config: QuantConfig, layers: list[ExpertLayer], wanted: Any, built: BuiltExperts
) -> Iterator[Observed]:
    """The modules that get a scheme."""
    towers = {str(n.meta.get("module", "")): n.meta["tower"] for n in prog.graph.nodes if "tower" in n.meta}
    for layer in layers:
        tower = _tower(layer.module, towers)
        scheme = config.scheme(tower)
        if scheme is None or (wanted is not None and not wanted(model.get_submodule(layer.module), layer.module)):
            built.known.difference_update(stack.fqn for stack in layer.stacks)
            continue
        reason = _why_not(config, layer)
        if reason:
            built.refused += [Refusal(stack.fqn, layer.node, reason) for stack in layer.stacks]
        else:
            yield Observed(layer, _for_experts(scheme), tower)


def _tower(module: str, towers: Mapping[str, str]) -> str:
    """The tower of the linear that is next to a module in the model's tree."""

    def shared(name: str) -> int:
        pairs = zip(name.split("."), module.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(name.count("."), module.count(".")) + 1)

    return towers[max(towers, key=shared)] if towers else "language"


def _why_not(config: QuantConfig, layer: ExpertLayer) -> str:
    for stack in layer.stacks:
        pattern = next((p for p in config.keeps("") if kept(p, stack.fqn, "") or kept(p, layer.module, "")), None)
        if pattern is not None:
            return f"{KEPT} ({pattern})"
    return ""


@dataclass(frozen=True)
class _Transform:
    """The online Hadamard in front of the stacks that read a gate."""

    stacks: set[str]

    def __call__(self, stack: Stack, x: Tensor) -> Tensor:
        """H x, or x where the stack has none."""
        if stack.fqn not in self.stacks:
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        return apply_factors(x, [f.to(x.device, wide) for f in hadamard_factors(x.shape[-1])])

    def words(self, stack: Stack, width: int) -> tuple[str, ...]:
        """For the report."""
        return (f"online {hadamard_kind(width)}",) if stack.fqn in self.stacks else ()


def _parts(model: nn.Module, chosen: list[Observed]) -> Iterator[list[Observed]]:
    """The modules in groups whose second moments fit into ``MEMORY``."""
    part: list[Observed] = []
    held = 0
    for each in chosen:
        shapes = [dense(model, s).shape for s in each.layer.stacks] if each.scheme.weight.needs_hessian else []
        size = sum(8 * shape[0] * shape[2] ** 2 for shape in shapes)
        if part and held + size > MEMORY:
            yield part
            part, held = [], 0
        part.append(each)
        held += size
    if part:
        yield part


def _build(
    model: nn.Module,
    each: Observed,
    seen: Mapping[str, StackStatistics],
    transform: _Transform,
    context: ModalityContext | None,
    built: BuiltExperts,
    ranks: Ranks,
) -> None:
    """One module: solve, or say why not."""
    scales: dict[str, Tensor | None] = {}
    spec = each.scheme.activation
    for stack in each.layer.stacks:
        scales[stack.fqn] = None if spec is None else seen[stack.fqn].scales(spec, each.language)
        if spec is not None and scales[stack.fqn] is None:
            reason = "calibration routed no token to any of its experts, so they have no static scale"
            built.refused += [Refusal(s.fqn, each.layer.node, reason) for s in each.layer.stacks]
            return
    stacks: list[QuantStack] = []
    for stack in each.layer.stacks:
        start = time.perf_counter()
        statistics, scale = seen.get(stack.fqn), scales[stack.fqn]
        module, error, note = _solved(model, stack, each.scheme, statistics, scale, transform, ranks)
        if statistics is not None:
            note = "; ".join(filter(None, (statistics.note(spec is not None), note)))
        stacks.append(module)
        built.layers.append(
            LayerReport(
                stack.fqn,
                each.tower,
                "experts",
                str(each.scheme),
                transform.words(stack, module.in_features),
                {},
                {} if statistics is None else statistics.ranges(),
                {},
                error,
                0,
                time.perf_counter() - start,
                note,
            )
        )
    up, down = (stacks, None) if each.layer.down is None else (stacks[:-1], stacks[-1])
    made = QuantExperts(each.layer.call, up, each.layer.gate, down)
    if any(s.input_scale is not None and s.input_scale.shape[1] == 2 for s in stacks):
        made.modality = context
    built.modules[each.layer.module] = made


def _solved(
    model: nn.Module,
    stack: Stack,
    scheme: Scheme,
    statistics: StackStatistics | None,
    input_scale: Tensor | None,
    transform: _Transform,
    ranks: Ranks,
) -> tuple[QuantStack, float, str]:
    """One stack: (module, |W - Q| / |W|, the solver's notes)."""
    weights = dense(model, stack)
    experts, outputs, width = weights.shape
    bias = None if stack.bias is None else model.get_parameter(stack.bias).detach()
    made = QuantStack(
        experts,
        width,
        outputs,
        weight_bits=scheme.weight.bits,
        group_size=scheme.weight.group_size,
        activation_bits=None if input_scale is None else 8,
        input_scales=0 if input_scale is None else input_scale.shape[1],
        bias=bias is not None,
        hadamard=stack.fqn in transform.stacks,
        zero="float" if scheme.weight.float_zero else not scheme.weight.symmetric,
        dtype=weights.dtype,
        device=weights.device,
    )
    if input_scale is not None and made.input_scale is not None:
        made.input_scale.copy_(input_scale)
    if bias is not None and made.bias is not None:
        made.bias.copy_(bias)
    lost, size, notes = 0.0, 0.0, set[str]()
    if scheme.weight.amplifier is not None:
        notes.add("integer scales are computed with as floats: grouped_matmul has no integer form")

    def solution(e: int) -> tuple[Tensor, Tensor, Tensor | None, float, float, str]:
        w = transform(stack, weights[e].double() if weights.dtype == torch.float64 else weights[e].float())
        hessian = None if statistics is None or statistics.hessian is None else statistics.hessian[e]
        saw = statistics is not None and int(statistics.seen()[e]) > 0
        solved = solve(w, _spec(scheme.weight, saw), hessian if saw else None, name=f"{stack.fqn}[{e}]")
        codes = solved.codes if made.storage_bits == 8 else pack(solved.codes, made.storage_bits)
        error, power = float((w - solved.dequantize()).norm() ** 2), float(w.norm() ** 2)
        return codes, solved.scale, solved.zero, error, power, solved.note

    step = TOGETHER * ranks.size
    for start in range(0, experts, step):
        mine = ranks.mine(range(start, min(start + step, experts)))
        for e, (codes, scale, zero, error, power, note) in ranks.collected([(e, solution(e)) for e in mine]):
            made.qweight[e], made.weight_scale[e] = codes, scale
            if zero is not None and made.weight_zero is not None:
                made.weight_zero[e] = zero
            lost, size = lost + error, size + power
            notes.add(note)
    return made, math.sqrt(lost / size) if size else math.nan, "; ".join(sorted(filter(None, notes)))


def _spec(spec: WeightSpec, saw: bool) -> WeightSpec:
    """Rounding to nearest in place of what needs data, for an expert that no token reached."""
    return dataclasses.replace(spec, solver="rtn") if spec.needs_hessian and not saw else spec


def _measure(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    quantized: Mapping[str, QuantExperts],
    language: Mapping[str, bool],
    context: ModalityContext | None,
) -> dict[str, Loss]:
    """Signal and noise of every module's output, on the inputs of the float model."""
    losses = {name: Loss() for name in quantized}

    def meter(name: str, wanted: Tensor, args: Any, kwargs: Any) -> None:
        loss, error = losses[name], quantized[name](*args, **kwargs) - wanted
        signal, noise = (by_modality(t, language[name], context) for t in (wanted, error))
        for modality in signal:
            for total, part in ((loss.signal, signal[modality]), (loss.noise, noise[modality])):
                total[modality] = total.get(modality, 0.0) + float(part.double().square().sum())

    with observe(model, {Output(name): partial(meter, name) for name in quantized}):
        for batch in batches if quantized else ():
            model(**batch)
    return losses
