"""The steps of one ``quantize_``: record, rewrite, calibrate and quantize unit by unit, report."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmqc.calibration.blocks import NotStreamableError, survey
from mmqc.calibration.calibrate import MIXED, InputStatistics, Watch
from mmqc.calibration.measure import Loss
from mmqc.calibration.residency import Residency
from mmqc.calibration.sequential import Sequential
from mmqc.checkpoint.hf import attach_config
from mmqc.config import HEAD, ConfigError, QuantConfig
from mmqc.experts.find import products
from mmqc.experts.modules import QuantExperts
from mmqc.experts.quantize import BuiltExperts, quantize_experts
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program
from mmqc.graph.record import record
from mmqc.graph.runner import Steps, run
from mmqc.kv.rounding import observed, round_keys_and_values
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import QuantLinear
from mmqc.nn.modality import ModalityContext, detach
from mmqc.nn.unseen import guard, unseen_modules, unsure_weights
from mmqc.passes.assign_scheme import kept
from mmqc.pipeline import FACTS, exact_passes, quantizing_passes
from mmqc.quantization import convert
from mmqc.quantization.channel_scales import Forwards, scale_channels
from mmqc.quantization.equivalence import check, outputs
from mmqc.quantization.incoherence import incoherences, weight_towers
from mmqc.quantization.measured_rewrites import measured_rewrites
from mmqc.quantization.options import Batch, Options
from mmqc.quantization.progress import Progress
from mmqc.quantization.resume import Store, Unit
from mmqc.report.report import LayerReport, QuantReport, Refusal, refusals, transforms

MEASURED_BATCHES = 4


class Job:
    """One call of ``quantize_``; holds what its steps share.

    As ``sequential.Worker`` it solves units, keeps them in ``store`` if there is one, and swaps them in.
    """

    def __init__(
        self,
        model: nn.Module,
        config: QuantConfig,
        batches: list[Batch],
        context: ModalityContext,
        journal: convert.Journal,
        bar: Progress,
        filter_fn: Callable[[nn.Module, str], bool] | None,
        options: Options,
        residency: Residency,
        store: Store | None,
    ) -> None:
        self.model, self.config, self.batches = model, config, batches
        self.context, self.journal, self.bar, self.filter_fn = context, journal, bar, filter_fn
        self.options, self.residency, self.store = options, residency, store
        self.found = Unit()
        self.errors: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self.built: dict[str, PackedLinear] = {}

    def run(self) -> QuantReport:
        """The steps in order."""
        prog = self.prog = record(self.model, *self.recorded(), decode=takes_cache(self.model))
        prog.work = self.residency.device if self.residency.offloads else None
        prog.unsure = unsure_weights(self.model, prog.called)
        self.unseen = unseen_modules(self.model, prog.called)
        self.rewrite(prog)
        self.steps = [Steps(prog, item, FACTS, text=True) for item in self.solvers()]
        self.nodes = {weight_of(n): n for n in prog.nodes("linear") if "scheme" in n.meta}
        self.places = {fqn: (node.meta["tower"], node.meta["role"]) for fqn, node in self.nodes.items()}
        self.schemes = {fqn: node.meta["scheme"] for fqn, node in self.nodes.items()}
        prog.statistics = {
            "visual_token_ids": list(self.context.visual_token_ids),
            "token_embeddings": _token_embeddings(prog),
            "linears": {},
            "plan": prog.decided.to_dict(),
        }
        experts = self.experts(prog)
        whole = self.quantize()
        for module, mixture in experts.modules.items():
            self.journal.swap(module, mixture)
        for steps in self.steps:
            if steps.done or steps is self.steps[-1]:  # most configs have nothing for the others
                steps.finish()
        run(prog, quantizing_passes()[len(self.steps) :], FACTS, text=True)
        linears: Any = prog.statistics["linears"]
        prog.statistics = {**prog.statistics, "linears": {fqn: linears[fqn] for fqn in self.nodes}}
        config = self.config.replace(statistics=prog.statistics)
        notes = [Refusal("", "", note) for note in prog.notes]
        stale = (r for r in refusals(prog) if r.fqn not in experts.known)
        refused = [*stale, *experts.refused, *self.unreached(), *whole, *notes]
        report = QuantReport(config, [*self.layers(), *experts.layers], refused, prog.records)
        report.incoherence, report.towers, report.rewrite_error = self.incoherence, self.towers, self.rewrite_error
        if self.options.then is not None:
            self.bar.say("searching")
            self.options.then(self.residency.batch)
        self.finish(config, report)
        return report

    def rewrite(self, prog: Program) -> None:
        """Run the exact passes and write what they decided into the model."""
        run(prog, exact_passes(self.config), FACTS, text=True)
        _check_keep(prog, self.config)
        self.filter(prog)
        before, self.towers = incoherences(prog), weight_towers(prog)
        first = self.call(self.batches[0])
        scales, smoothed = self.config.rewrites.scales, self.config.rewrites.smooth
        expected = outputs(self.model, first) if prog.changed or scales is not None or smoothed is not None else []
        self.untied = convert.write_exact(self.model, prog, self.journal)
        if scales is not None:
            self.bar.say("scaling channels")
            scale_channels(self.model, prog, scales, self.forwards())
            self.untied += convert.write_weights(self.model, prog, self.journal)
        with ExitStack() as stack:
            kv, bases = self.config.kv_rounding, self.config.rewrites.bases
            keys = stack.enter_context(observed(self.model, kv)) if kv is not None else {}
            self.untied += measured_rewrites(self.model, prog, self.config, lambda: map(self.call, self.batches), self.journal)
            # The forwards that find bases went through the keys too, which no basis changes.
            if kv is not None and bases is None:
                with torch.no_grad():
                    for batch in self.batches if kv.basis in ("principal", "peaks") else self.batches[:1]:
                        self.forward(batch)
        self.rewrite_error = check(expected, outputs(self.model, first)) if expected else 0.0
        if kv is not None:
            round_keys_and_values(self.model, kv, keys, self.config.rewrites.seed, self.journal)
        after = incoherences(prog)
        self.incoherence = {fqn: (before[fqn], after[fqn]) for fqn in before}

    def recorded(self) -> list[Batch]:
        """The first batch, and the one that differs from it most in what it holds and in its shapes."""
        first = self.batches[0]
        other = max(self.batches, key=lambda batch: _difference(first, batch))
        return [self.call(b) for b in ([first] if _difference(first, other) == 0 else [first, other])]

    def call(self, batch: Batch) -> dict[str, Any]:
        """A batch as keyword arguments of one whole forward."""
        batch = self.residency.batch(dict(batch))
        return {**batch, "use_cache": False} if takes_cache(self.model) else batch

    def forwards(self) -> Forwards:
        """All batches, for what looks at data before calibration."""
        calls = [functools.partial(self.forward, b) for b in self.batches]
        recorded = [functools.partial(self.forward, b) for b in self.recorded()]
        options = self.options
        return Forwards(calls, recorded, self.context, self.residency, options.row_weights, options.spool, self.bar.say)

    def forward(self, batch: Batch) -> Any:
        """One whole forward."""
        return self.model(**self.call(batch))

    def filter(self, prog: Program) -> None:
        """Take the scheme from linears that the caller does not want quantized."""
        for node in prog.nodes("linear") if self.filter_fn is not None else ():
            fqn = weight_of(node).removesuffix(".weight")
            if "scheme" in node.meta and not self.filter_fn(self.model.get_submodule(fqn), fqn):  # type: ignore[misc]
                del node.meta["scheme"]

    def experts(self, prog: Program) -> BuiltExperts:
        """Stacked experts, which no linear module holds."""
        self.bar.say("quantizing experts")
        built = quantize_experts(
            self.model,
            prog,
            self.config,
            lambda: map(self.call, self.batches),
            lambda: map(self.call, self.batches[:: max(1, len(self.batches) // MEASURED_BATCHES)][:MEASURED_BATCHES]),
            context=self.context,
            wanted=self.filter_fn,
            row_weights=self.options.row_weights,
        )
        if self.options.inputs == "quantized":
            for layer in built.layers:
                layer.note = "; ".join(filter(None, (layer.note, "measured in the floating-point model")))
        return built

    def unreached(self) -> Iterator[Refusal]:
        """Linears of modules that the model has and the batches do not use."""
        for name in self.unseen:
            for child, module in self.model.get_submodule(name).named_modules():
                if isinstance(module, nn.Linear):
                    yield Refusal(f"{name}.{child}".rstrip("."), "", "no recorded batch reached it")

    # -- unit by unit ----------------------------------------------------------------------------------------------
    def quantize(self) -> list[Refusal]:
        """All units; what comes back are the lists of blocks that could not be taken one by one."""
        names = [fqn.removesuffix(".weight") for fqn in self.nodes]
        if not names:
            return []
        self.bar.expect(len(names))
        bases = self.config.rewrites.bases
        batches = self.batches[: bases.solver_batches] if bases is not None else self.batches
        chosen = range(0, len(batches), max(1, len(batches) // MEASURED_BATCHES))
        sequence = Sequential(
            self.model,
            self,
            names,
            self.watches(),
            {n: self.is_language(f"{n}.weight") for n in names},
            [functools.partial(self.forward, b) for b in batches],
            list(chosen)[:MEASURED_BATCHES],
            self.context,
            self.residency,
            self.options.inputs,
            self.options.spool,
            self.bar.say,
        )
        refused: dict[str, str] = {}
        while True:
            with torch.no_grad():
                calls = [functools.partial(self.forward, b) for b in self.recorded()]
                sequence.linears = [name for name in names if name not in self.built]
                layout = survey(self.model, sequence.linears, calls, refused)
            try:
                sequence.run(layout)
            except NotStreamableError as error:
                refused = {**layout.refused, error.where: error.reason}
                continue
            whole = "calibrated by forwards of the whole model"
            return [Refusal(where, "", f"{whole}: {reason}") for where, reason in layout.refused.items()]

    def is_language(self, fqn: str) -> bool:
        """Whether the rows of a weight's input are the language model's tokens."""
        return self.places[fqn][0] == "language"

    def watches(self) -> dict[str, Watch]:
        """What to observe of each linear that needs data, by module FQN."""
        return {
            fqn.removesuffix(".weight"): Watch(
                self.model.get_submodule(fqn.removesuffix(".weight")),
                self.is_language(fqn),
                scheme.activation,
                scheme.weight.needs_hessian,
                self.nodes[fqn].meta.get("outliers"),
                self.options.row_weights,
            )
            for fqn, scheme in self.schemes.items()
            if scheme.activation is not None or scheme.weight.needs_hessian
        }

    def solvers(self) -> tuple[Any, Any]:
        """The passes that round weights, told where second moments are."""
        self.moments: dict[str, Tensor | None] = {}
        self.earlier: dict[Any, Any] = {}  # results of an earlier run
        given = {"hessian": lambda fqn: self.moments.pop(fqn, None), "done": self.solved}
        passes: Any = quantizing_passes(**given)
        mixed, plain, *_ = passes
        return tuple(dataclasses.replace(item, cache=self.earlier) for item in (mixed, plain))  # type: ignore[return-value]

    def solved(self, fqn: str, result: Any, error: float, seconds: float) -> None:
        """The pass has rounded one weight."""
        self.found.solved[fqn], self.errors[fqn] = result, error
        self.found.seconds.setdefault(fqn, seconds)

    def finished(self, linears: Sequence[str]) -> bool:
        """Whether a unit is done: in this run or in an earlier one."""
        return set(linears) <= self.built.keys() or (self.store is not None and self.store.has(linears))

    def restore(self, linears: Sequence[str]) -> None:
        """Swap in what an earlier run found."""
        if self.store is None or set(linears) <= self.built.keys():
            return
        unit = self.store.load(linears, self.residency.device)
        self.found.seconds.update(unit.seconds)
        for fqn, result in unit.solved.items():
            self.earlier[(fqn, ())] = result
        self.put(self.solve(linears, {n: unit.seen[f"{n}.weight"] for n in linears}), unit.losses)

    def solve(self, linears: Sequence[str], seen: Mapping[str, InputStatistics]) -> dict[str, PackedLinear]:
        """Quantize the weights of a unit."""
        wanted = [f"{name}.weight" for name in linears]
        for fqn in wanted:
            name = fqn.removesuffix(".weight")
            self.prog.weights[fqn] = self.model.get_submodule(name).get_parameter("weight").detach()
            statistics = self.found.seen[fqn] = seen.get(name, InputStatistics())
            self.moments[fqn], statistics.hessian = statistics.hessian, None
            self.note(fqn, statistics)
        for steps in self.steps:
            steps.rewrite(lambda site: site.fqn in wanted)
        return convert.build_quantized(self.model, self.prog, self.context, wanted)

    def note(self, fqn: str, seen: InputStatistics) -> None:
        """What ``report.config`` carries of a linear: scales and places, by weight FQN."""
        spec, outliers = self.schemes[fqn].activation, self.nodes[fqn].meta.get("outliers")
        linears: Any = self.prog.statistics["linears"]  # type: ignore[index]
        linears[fqn] = {
            "tower": self.places[fqn][0],
            "role": self.places[fqn][1],
            "input_scale": seen.scales(spec, self.is_language(fqn)) if spec is not None else None,
            "outliers": [] if outliers is None else outliers.tolist(),
        }

    def swap(self, built: Mapping[str, PackedLinear], losses: Mapping[str, Loss]) -> None:
        """Store a unit that was just quantized, and put it into the model."""
        if self.store is not None and built:
            fqns = [f"{name}.weight" for name in built]
            kept = {field: {f: getattr(self.found, field)[f] for f in fqns} for field in ("solved", "seen", "seconds")}
            self.store.save(list(built), Unit(**kept, losses=dict(losses)))
        self.put(built, losses)

    def put(self, built: Mapping[str, PackedLinear], losses: Mapping[str, Loss]) -> None:
        """Swap, and let go of everything of the unit that takes memory."""
        for name, linear in built.items():
            self.journal.swap(name, linear)
            self.release(f"{name}.weight")
        self.built.update(built)
        self.found.losses.update(losses)
        self.bar.done(len(built), losses)

    def release(self, fqn: str) -> None:
        """Leave only shapes of a weight in the program, and only the note of its result."""
        solved = self.found.solved.pop(fqn)
        self.notes[fqn] = solved.note
        if not solved.integer:  # integer scales are written into the graph at the end
            self.prog.solved.pop(fqn, None)
        self.earlier.clear()
        for name in [n for n in self.prog.weights if n == fqn or n.startswith(f"{fqn}.")]:
            weight = self.prog.weights[name]
            self.prog.weights[name] = weight.new_zeros(()).expand(weight.shape)

    def forget(self) -> None:
        """Let go of the quantized linears: room for what a failed call brings back."""
        self.built.clear()

    # -- report ----------------------------------------------------------------------------------------------------
    def layers(self) -> list[LayerReport]:
        """One row for every quantized linear, in the model's order."""
        texts = transforms(self.prog)
        rows = []
        for fqn in (f for f in self.nodes if f.removesuffix(".weight") in self.built):
            module = fqn.removesuffix(".weight")
            linear, seen, loss = self.built[module], self.found.seen[fqn], self.found.losses.get(module, Loss())
            ranges = {m: (r.low, r.high) for m, r in seen.ranges.items() if r.count}
            outliers = 0 if linear.outlier_index is None else linear.outlier_index.numel()
            note = "; ".join(filter(None, (self.notes[fqn], _one_scale(linear, seen))))
            rows.append(
                LayerReport(
                    module,
                    *self.places[fqn],
                    str(self.schemes[fqn]),
                    texts.get(fqn, ()),
                    loss.sqnr(),
                    ranges,
                    loss.saturated(),
                    self.errors[fqn],
                    outliers,
                    self.found.seconds[fqn],
                    note,
                )
            )
        return rows

    def finish(self, config: QuantConfig, report: QuantReport) -> None:
        """Leave on the model what it needs to run, ``save_pretrained`` and ``explain``: the visual mask, the record."""
        if not any(isinstance(m, QuantLinear | QuantExperts) and m.modality is not None for m in self.model.modules()):
            detach(self.model)
        passes = [
            {
                "name": r.name,
                "exact": r.exact,
                "sites": r.sites,
                "misses": [str(m) for m in r.misses],
                "ms": round(r.ms, 1),
                "delta": r.delta,
            }
            for r in report.passes
        ]
        if self.config.rewrites.fold_norms:
            guard(self.model, self.unseen)
        attach_config(self.model, config, {"passes": passes, "untied": self.untied, "unseen": self.unseen})


def takes_cache(model: nn.Module) -> bool:
    """Whether the model's forward knows ``use_cache``."""
    parameters = inspect.signature(model.forward).parameters
    return "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _difference(a: Batch, b: Batch) -> int:
    """How many of two batches' tensors are in one only, or have other shapes; equal-shaped values count nothing."""
    shapes = [{n: tuple(v.shape) for n, v in batch.items() if isinstance(v, Tensor)} for batch in (a, b)]
    return 100 * len(set(shapes[0]) ^ set(shapes[1])) + sum(shapes[0][n] != shapes[1].get(n) for n in shapes[0])


def _check_keep(prog: Program, config: QuantConfig) -> None:
    """Raise a ConfigError for a pattern that means no linear of the model; ``lm_head`` is there by default."""
    linears = sorted({weight_of(n).removesuffix(".weight") for n in prog.nodes("linear") if weight_of(n)})
    linears += sorted(fqn for uses in products(prog).values() for fqn in uses)
    for pattern in config.keep:
        if pattern != HEAD and not any(kept(pattern, fqn, "") for fqn in linears):
            raise ConfigError(
                f"keep pattern {pattern!r} matches no linear of this model; some of its linears: {linears[:3]} ... {linears[-2:]}"
            )


def _token_embeddings(prog: Program) -> list[str]:
    """Weights that are looked up with the token ids themselves."""
    found = []
    for node in prog.nodes("embedding"):
        index, weight = operands(node)["input"], operands(node)["weight"]
        if isinstance(index, fx.Node) and index.op == "placeholder" and isinstance(weight, fx.Node):
            found.append(str(weight.target))
    return found


def _one_scale(linear: PackedLinear, seen: InputStatistics) -> str:
    """Why a linear has one input scale for both modalities, if calibration decided that."""
    mixed = linear.input_scale is not None and seen.ranges[MIXED].count
    return "its rows are not the tokens of the call: one scale for both modalities" if mixed else ""
