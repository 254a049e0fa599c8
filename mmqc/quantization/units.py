"""Calibrate and quantize unit by unit: observe a unit's inputs, round its weights, measure, swap, let go, go on to the next.

What a unit is, and in which order units come, says ``calibration/sequential.py``; here is what is done with one.  Stacked experts,
which no linear module holds, are quantized first, in the floating-point model, and swapped in last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.blocks import NotStreamableError, survey
from mmqc.calibration.calibrate import MIXED, TEXT, VISUAL, InputStatistics
from mmqc.calibration.learn import BatchLoss, Start, holding, learn
from mmqc.calibration.measure import Loss
from mmqc.calibration.sequential import Sequential
from mmqc.config import QuantConfig
from mmqc.experts.quantize import BuiltExperts, quantize_experts
from mmqc.graph.runner import Steps, run
from mmqc.nn.integer_weight import PackedLinear
from mmqc.passes.quantize_weights import relative_error
from mmqc.pipeline import FACTS, activation_passes, weight_passes
from mmqc.quantization import convert
from mmqc.quantization.job import Job
from mmqc.quantization.resume import Unit
from mmqc.quantization.rewrite import Rewritten
from mmqc.quantization.targets import Target, Targets
from mmqc.report.report import LayerReport, Refusal, refusals, transforms
from mmqc.solvers.asymmetric import toward_float

MEASURED_BATCHES = 4
NOT_PAIRED = "the floating-point model's inputs are not compared: its list of blocks was not taken apart, or its rows are routed"
LEARNED, NOT_LEARNED = "by learning", "in no block that can be run by itself: not learned, but rounded by gptq"


@dataclass(frozen=True, eq=False)
class Quantized:
    """A model whose weights are quantized, as far as the config says so.

    Attributes:
        config: with the statistics that calibration measured.
        layers: what the report says of each quantized linear and stack.
        refused: what stays as it was, and why.
        rewritten: what was known before; None for a model that was not recorded.
    """

    config: QuantConfig
    layers: tuple[LayerReport, ...] = ()
    refused: tuple[Refusal, ...] = ()
    rewritten: Rewritten | None = None


def quantize_units(job: Job, rewritten: Rewritten, targets: Targets) -> Quantized:
    """Quantize the experts and all linears of ``targets``, and say so in the program."""
    prog = rewritten.program
    worker = UnitWorker(job, rewritten, targets)
    experts = _experts(job, rewritten)
    whole = _run(job, rewritten, targets, worker)
    job.journal.swap(experts.modules)
    worker.finish()
    layers = [worker.rows[t.module] for t in targets.linears.values() if t.module in worker.rows]
    stale = [r for r in refusals(prog) if r.fqn not in experts.known]
    notes = [Refusal("", "", note) for note in prog.notes]
    refused = (*stale, *experts.refused, *_unreached(job.model, rewritten), *whole, *notes)
    config = job.request.config.replace(statistics=prog.statistics)
    return Quantized(config, (*layers, *experts.layers), refused, rewritten)


def _experts(job: Job, rewritten: Rewritten) -> BuiltExperts:
    """Stacked experts; the model is not changed."""
    job.bar.say("quantizing experts")
    measured = job.batches[:: max(1, len(job.batches) // MEASURED_BATCHES)][:MEASURED_BATCHES]
    built = quantize_experts(
        job.model,
        rewritten.program,
        job.request.config,
        lambda: map(job.call, job.ranks.mine(job.batches)),
        lambda: map(job.call, measured),
        context=rewritten.context,
        wanted=job.request.filter_fn,
        row_weights=job.request.row_weights,
        ranks=job.ranks,
    )
    if job.request.inputs != "float":
        for layer in built.layers:
            layer.note = "; ".join(filter(None, (layer.note, "measured in the floating-point model")))
    return built


def _run(job: Job, rewritten: Rewritten, targets: Targets, worker: UnitWorker) -> list[Refusal]:
    """All units; what comes back are the lists of blocks that could not be taken one by one."""
    names = [target.module for target in targets.linears.values()]
    if not names:
        return []
    job.bar.expect(len(names))
    request, bases = job.request, job.request.config.rewrites.bases
    batches = job.batches[: bases.solver_batches] if bases is not None else job.batches
    chosen = range(0, len(batches), max(1, len(batches) // MEASURED_BATCHES))
    sequence = Sequential(
        job.model,
        worker,
        names,
        targets.watches,
        {target.module: target.language for target in targets.linears.values()},
        job.forwards(batches),
        list(chosen)[:MEASURED_BATCHES],
        rewritten.context,
        job.residency,
        request.inputs,
        request.spool,
        job.bar.say,
        job.ranks,
    )
    refused: dict[str, str] = {}
    while True:
        with torch.no_grad():
            sequence.linears = [name for name in names if name not in worker.rows]
            layout = survey(job.model, sequence.linears, job.forwards(job.differing()), refused)
        try:
            sequence.run(layout)
        except NotStreamableError as error:
            refused = {**layout.refused, error.where: error.reason}
            continue
        whole = "calibrated by forwards of the whole model"
        return [Refusal(where, "", f"{whole}: {reason}") for where, reason in layout.refused.items()]


def _unreached(model: nn.Module, rewritten: Rewritten) -> Iterator[Refusal]:
    """What the model has and the batches do not use, and the linears in it."""
    reason = "no recorded batch reached it"
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in rewritten.unseen:
        barred = name in rewritten.misfits
        parts = [] if name in parameters else model.get_submodule(name).named_modules()
        linears = [f"{name}.{child}".rstrip(".") for child, module in parts if isinstance(module, nn.Linear)]
        for fqn in dict.fromkeys((name, *linears) if barred else linears):
            yield Refusal(fqn, "", f"{reason}, and it would not fit what was rewritten: it raises if it runs" if barred else reason)


@dataclass(frozen=True, eq=False)
class Solved:
    """A weight that is rounded, and not in the model yet."""

    result: Any
    error: float
    seconds: float


class UnitWorker:
    """Rounds the weights of units and swaps them in, as ``sequential.Worker`` says; holds no more than the units in progress.

    Attributes:
        rows: what the report says of each linear that is in the model, by module FQN.
    """

    def __init__(self, job: Job, rewritten: Rewritten, targets: Targets) -> None:
        self.job, self.program, self.context, self.targets = job, rewritten.program, rewritten.context, targets.linears
        self.words = transforms(self.program)
        self.rows: dict[str, LayerReport] = {}
        self.solved: dict[str, Solved] = {}  # by weight FQN, as the next four
        self.seen: dict[str, InputStatistics] = {}
        self.moments: dict[str, Tensor | None] = {}
        self.drifts: dict[str, Tensor | None] = {}
        self.statistics: dict[str, dict[str, Any]] = {}
        self.earlier: dict[Any, Any] = {}  # results of an earlier run, or of other ranks, by the passes' keys
        self.took: dict[str, float] = {}  # seconds of the owner, by weight FQN
        self.owned: dict[str, int] = {}  # the rank that solves a linear, by module FQN
        self.mine: list[tuple[str, Any, float]] = []  # that this rank has solved and the others do not know
        passes = weight_passes(
            hessian=lambda fqn: self.moments.pop(fqn, None), aim=self.aimed, done=self.rounded, cache=self.earlier
        )
        self.steps = [Steps(self.program, item, FACTS, text=True) for item in passes]
        self.program.statistics = {
            "visual_token_ids": list(self.context.visual_token_ids),
            "token_embeddings": list(targets.token_embeddings),
            "linears": self.statistics,
            "plan": self.program.decided.to_dict(),
        }

    def rounded(self, fqn: str, result: Any, error: float, seconds: float) -> None:
        """The pass has rounded one weight."""
        self.solved[fqn] = Solved(result, error, seconds + self.took.pop(fqn, 0.0))

    def aimed(self, fqn: str, weight: Tensor, hessian: Tensor | None) -> Tensor:
        """What a solver is given of a weight."""
        drift = self.drifts.pop(fqn, None)
        return weight if drift is None or hessian is None else toward_float(weight, hessian, drift, name=fqn)

    def finished(self, linears: Sequence[str]) -> bool:
        """Whether a unit is done: in this run or in an earlier one."""
        store = self.job.store
        return set(linears) <= self.rows.keys() or (store is not None and store.has(linears))

    def restore(self, linears: Sequence[str]) -> None:
        """Swap in what an earlier run found."""
        store = self.job.store
        if store is None or set(linears) <= self.rows.keys():
            return
        unit = store.load(linears, self.job.residency.device)
        self.earlier.update({(fqn, ()): result for fqn, result in unit.solved.items()})
        self.put(self.solve(linears, {n: unit.seen[f"{n}.weight"] for n in linears}), unit.losses, unit.seconds)

    def solve(self, linears: Sequence[str], seen: Mapping[str, InputStatistics]) -> dict[str, PackedLinear]:
        """Quantize the weights of a unit."""
        wanted = [f"{name}.weight" for name in linears]
        if self.job.ranks.size > 1 and not any((fqn, ()) in self.earlier for fqn in wanted):
            self.solve_mine(linears, seen)
            self.exchange()
        self.prepare(linears, seen)
        for steps in self.steps:
            steps.rewrite(lambda site: site.fqn in wanted)
        return convert.build_quantized(self.job.model, self.program, self.context, wanted)

    def learns(self, linears: Sequence[str]) -> list[str]:
        """Those that the solver ``learned`` rounds."""
        return [name for name in linears if self.targets[f"{name}.weight"].scheme.weight.solver == "learned"]

    def learn(self, linears: Sequence[str], block: str, loss: BatchLoss, batches: Sequence[int]) -> dict[str, PackedLinear]:
        """Go on from what ``solve`` found."""
        began, wanted = time.perf_counter(), [f"{name}.weight" for name in self.learns(linears)]
        starts, parameters = {}, {fqn: self.job.model.get_parameter(fqn).detach() for fqn in wanted}
        for fqn, weight in parameters.items():
            outliers = self.targets[fqn].outliers
            kept = None if outliers is None else outliers.to(weight.device)
            start = Start(
                self.solved[fqn].result.to(weight.device),
                self.targets[fqn].scheme.weight.bits,
                None if kept is None else (kept, weight[:, kept].float()),
                weight.dtype,
            )
            starts[fqn.removeprefix(f"{block}.")] = start

        steps = max(self.targets[fqn].scheme.weight.steps for fqn in wanted)
        module = self.job.model.get_submodule(block)
        found, before, after = learn(starts, lambda weights: holding(module, weights), loss, batches, steps)
        seconds = (time.perf_counter() - began) / len(wanted)
        for name, solved in found.items():
            fqn, note = f"{block}.{name}", f"the block's error x {after / before if before else 1:.3f} {LEARNED}"
            result = replace(solved, note="; ".join(filter(None, (solved.note, note))))
            self.program.solved[fqn] = result
            error = relative_error(parameters[fqn], result, self.targets[fqn].outliers)
            self.solved[fqn] = Solved(result, error, self.solved[fqn].seconds + seconds)
        return convert.build_quantized(self.job.model, self.program, self.context, [f"{name}.weight" for name in linears])

    def prepare(self, linears: Sequence[str], seen: Mapping[str, InputStatistics]) -> None:
        """Give the passes what they need of a unit."""
        for name in linears:
            fqn = f"{name}.weight"
            self.program.weights[fqn] = self.job.model.get_submodule(name).get_parameter("weight").detach()
            statistics = self.seen[fqn] = seen.get(name, InputStatistics())
            self.moments[fqn], statistics.hessian = statistics.hessian, None
            self.drifts[fqn], statistics.drift = statistics.drift, None
            self.statistics[fqn] = self.targets[fqn].statistics(statistics)

    def owners(self, linears: Sequence[str], first: int = 0) -> Mapping[str, int]:
        """Who solves which linear of a unit: N K² products and K³ of a factor with a second moment, N K without."""
        costs = []
        for name in linears:
            outputs, inputs = self.job.model.get_submodule(name).get_parameter("weight").shape
            moment = self.targets[f"{name}.weight"].scheme.weight.needs_hessian
            costs.append(float((outputs + inputs) * inputs**2 if moment else outputs * inputs))
        ranks = self.job.ranks
        found = {name: (rank + first) % ranks.size for name, rank in zip(linears, ranks.owners(costs), strict=True)}
        self.owned |= found
        return found

    def solve_mine(self, linears: Sequence[str], seen: Mapping[str, InputStatistics]) -> None:
        """Solve those of a unit that are this rank's."""
        if not self.owned.keys() >= set(linears):
            self.owners(linears)
        self.prepare(linears, seen)
        mine = {f"{name}.weight" for name in linears if self.owned[name] == self.job.ranks.rank}
        for steps in self.steps:
            item: Any = steps.item
            for site in steps.sites.values():
                if site.fqn in mine:
                    start = time.perf_counter()
                    self.mine.append((site.fqn, item.solution(self.program, site), time.perf_counter() - start))
        for name in linears:  # until the unit's turn comes
            self.hide(f"{name}.weight")

    def exchange(self) -> None:
        """Put all ranks' results where the passes look for them."""
        for fqn, result, seconds in self.job.ranks.collected(self.mine):
            self.earlier[fqn, ()] = result
            self.took[fqn] = seconds
        self.mine = []

    def swap(self, built: Mapping[str, PackedLinear], losses: Mapping[str, Loss]) -> None:
        """Store a unit that was just quantized, and put it into the model."""
        fqns = [f"{name}.weight" for name in built]
        seconds = {fqn: self.solved[fqn].seconds for fqn in fqns}
        if self.job.store is not None and built:
            seen = {fqn: self.seen[fqn] for fqn in fqns}
            unit = Unit({fqn: self.solved[fqn].result for fqn in fqns}, seen, seconds, dict(losses))
            self.job.store.save(list(built), unit)
            del unit  # the results go one by one
        self.put(built, losses, seconds)

    def put(self, built: Mapping[str, PackedLinear], losses: Mapping[str, Loss], seconds: Mapping[str, float]) -> None:
        """Swap, and let go of everything of the unit that takes memory."""
        for key in [key for key in self.earlier if key[0].removesuffix(".weight") in built]:
            del self.earlier[key]
        self.job.journal.swap(built)
        for name, linear in built.items():
            target = self.targets[f"{name}.weight"]
            solved, seen = self.solved.pop(target.weight), self.seen.pop(target.weight)
            self.rows[name] = self.row(target, linear, solved, seen, losses.get(name, Loss()), seconds[target.weight])
            self.release(target.weight, solved.result.integer)
        self.job.bar.done(len(built), losses)

    def release(self, fqn: str, integer: bool) -> None:
        """Leave only shapes of a weight in the program; integer scales are written into the graph at the end."""
        if not integer:
            self.program.solved.pop(fqn, None)
        self.hide(fqn)

    def hide(self, fqn: str) -> None:
        """Leave the shapes of a weight in the program, and no values."""
        for name in [n for n in self.program.weights if n == fqn or n.startswith(f"{fqn}.")]:
            weight = self.program.weights[name]
            self.program.weights[name] = weight.new_zeros(()).expand(weight.shape)

    def row(
        self, target: Target, linear: PackedLinear, solved: Solved, seen: InputStatistics, loss: Loss, seconds: float
    ) -> LayerReport:
        """What the report says of a linear."""
        mixed = linear.input_scale is not None and seen.ranges[MIXED].count
        one_scale = "its rows are not the tokens of the call: one scale for both modalities" if mixed else ""
        text, visual = (seen.row_weights.get(name, 1.0) for name in (TEXT, VISUAL))
        uneven = f"a row of text counted {text / visual:g} visual ones" if target.language and text != visual else ""
        note = solved.result.note
        paired = self.job.request.inputs != "asymmetric" or seen.paired
        learned = target.scheme.weight.solver != "learned" or LEARNED in note
        return LayerReport(
            target.module,
            target.tower,
            target.role,
            str(target.scheme),
            self.words.get(target.weight, ()),
            loss.sqnr(),
            {m: (r.low, r.high) for m, r in seen.ranges.items() if r.count},
            loss.saturated(),
            solved.error,
            0 if linear.outlier_index is None else linear.outlier_index.numel(),
            seconds,
            "; ".join(filter(None, (note, "" if learned else NOT_LEARNED, "" if paired else NOT_PAIRED, one_scale, uneven))),
        )

    def finish(self) -> None:
        """All units are done: round activations in the program, and put the statistics into the model's order."""
        prog = self.program
        for steps in self.steps:
            if steps.done or steps is self.steps[-1]:  # most configs have nothing for the others
                steps.finish()
        run(prog, activation_passes(), FACTS, text=True)
        assert prog.statistics is not None
        prog.statistics = {**prog.statistics, "linears": {fqn: self.statistics[fqn] for fqn in self.targets}}
