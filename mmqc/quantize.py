"""``quantize_``: record, rewrite, calibrate, quantize, convert; in place, and undone as a whole if anything fails."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from tqdm.auto import tqdm

from . import convert
from .account import refusals, transforms
from .calibrate import MIXED, CalibrationError, InputStatistics, Watch, calibrate
from .channel_scales import scale_channels
from .config import HEAD, ConfigError, QuantConfig
from .equivalence import check, outputs
from .graph.linear import operands, weight_of
from .graph.program import Program
from .graph.record import record
from .graph.runner import run
from .hf import attach_config
from .incoherence import incoherences, weight_towers
from .kv_rounding import round_keys_and_values
from .measure import Loss, measure
from .measured_rewrites import measured_rewrites
from .modality import ModalityContext, attached, detach
from .modules import QuantLinear
from .passes.assign_scheme import kept
from .pipeline import FACTS, exact_passes, quantizing_passes
from .report import LayerReport, QuantReport, Refusal
from .solvers import Quantized
from .unseen import guard, unseen_modules, unsure_weights
from .weights_only import quantize_weights_only

MEASURED_BATCHES = 4
Batch = Mapping[str, Any]


def quantize_(
    model: nn.Module,
    config: QuantConfig,
    calibration: Iterable[Batch] | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    progress: bool = True,
    resume_dir: str | None = None,
) -> QuantReport:
    """Quantize ``model`` in place by ``config``.

    Args:
        model: any transformers model; parameters float32, bfloat16 or float16.
        config: a recipe, e.g. ``mmqc.recipes.mquant()``.
        calibration: keyword batches for ``model.forward``, images included; iterated once.  The first batch is also
            what the model is recorded on.  None where the config quantizes weights only and rewrites nothing.
        filter_fn: as torchao's: only linears for which ``filter_fn(module, fqn)`` is true are quantized.
        progress: show a progress bar.
        resume_dir: not supported yet.

    Returns:
        What was done, with ``report.config`` for ``torch.compile(..., options={"config": report.config})``.

    Raises:
        ConfigError: the config cannot be applied to this model (a ``keep`` pattern that matches nothing, ...).
        CalibrationError: no batches, or none with images where the recipe is per modality.
        ValueError: a weight holds NaN or infinity, or the model is quantized already.
        RecordError: the forward cannot be recorded.
        RewriteError: the exact rewrites changed the output of the first batch by more than rounding.

    Whatever is raised, the model is as it was before the call.
    """
    start = time.perf_counter()
    _check_model(model, config, resume_dir)
    if calibration is None and config.rewrites == type(config.rewrites)() and not config.needs_calibration:
        return _weights_only(model, config, filter_fn, start)
    batches = _spool(model, config, calibration)
    before = convert.size_of(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    context = attached(model) or ModalityContext.attach(model, visual_token_ids(model))
    bar = tqdm(
        total=len(batches) + min(MEASURED_BATCHES, len(batches)), disable=not progress, desc="recording", unit="batch"
    )
    try:
        context.text_only = not context.visual_token_ids
        with bar, convert.Journal(model) as journal:
            report = _Job(model, config, batches, context, journal, bar, filter_fn).run()
            report.size_before, report.size_after = before, convert.size_of(model)
    except BaseException:
        detach(model)
        raise
    finally:
        model.train(modes[model])
        for module, training in modes.items():  # parts may be in another mode than the whole
            module.training = training
    report.seconds = time.perf_counter() - start
    return report


class _Job:
    """One call of ``quantize_``; holds what its steps share."""

    def __init__(
        self, model: nn.Module, config: QuantConfig, batches: list[Batch], context: ModalityContext,
        journal: convert.Journal, bar: Any, filter_fn: Callable[[nn.Module, str], bool] | None,
    ) -> None:  # fmt: skip
        self.model, self.config, self.batches = model, config, batches
        self.context, self.journal, self.bar, self.filter_fn = context, journal, bar, filter_fn
        self.solving: dict[str, tuple[Quantized, float, float]] = {}

    def run(self) -> QuantReport:
        """The steps in order."""
        prog = record(self.model, *self.recorded(), decode=takes_cache(self.model))
        prog.unsure = unsure_weights(self.model, prog.called)
        self.unseen = unseen_modules(self.model, prog.called)
        run(prog, exact_passes(self.config), FACTS, text=True)
        _check_keep(prog, self.config)
        self.filter(prog)
        before, self.towers = incoherences(prog), weight_towers(prog)
        first = self.call(self.batches[0])
        scales, smoothed = self.config.rewrites.scales, self.config.rewrites.smooth
        expected = outputs(self.model, first) if prog.changed or scales is not None or smoothed is not None else []
        self.untied = convert.write_exact(self.model, prog, self.journal)
        if scales is not None:
            self.bar.set_description("scaling channels")
            scale_channels(self.model, prog, scales, lambda: map(self.call, self.batches))
            self.untied += convert.write_weights(self.model, prog, self.journal)
        self.untied += measured_rewrites(
            self.model, prog, self.config, lambda: map(self.call, self.batches), self.journal
        )
        rewrite_error = check(expected, outputs(self.model, first)) if expected else 0.0
        if self.config.kv_rounding is not None:
            batches = lambda: map(self.call, self.batches)  # noqa: E731
            round_keys_and_values(self.model, self.config.kv_rounding, batches, self.config.rewrites.seed, self.journal)
        after = incoherences(prog)
        self.incoherence = {fqn: (before[fqn], after[fqn]) for fqn in before}
        nodes = {weight_of(n): n for n in prog.nodes("linear") if "scheme" in n.meta}
        statistics = self.calibrate(prog, nodes)
        prog.statistics = self.to_config(prog, nodes, statistics)
        self.bar.set_description("quantizing weights")
        run(prog, quantizing_passes(hessian=lambda fqn: statistics[fqn].hessian, done=self.solved), FACTS, text=True)
        built = convert.build_quantized(self.model, prog, self.context)
        losses = self.measure(prog, built)
        for module, linear in built.items():
            self.journal.swap(module, linear)
        config = self.config.replace(statistics=prog.statistics)
        notes = [Refusal("", "", note) for note in prog.notes]
        refused = [*refusals(prog), *self.unreached(), *notes]
        report = QuantReport(config, self.layers(prog, built, statistics, losses), refused, prog.records)
        report.incoherence, report.towers, report.rewrite_error = self.incoherence, self.towers, rewrite_error
        self.finish(config, report)
        return report

    def recorded(self) -> list[Batch]:
        """The first batch, and the one that differs from it most in what it holds and in its shapes."""
        first = self.batches[0]
        other = max(self.batches, key=lambda batch: _difference(first, batch))
        return [self.call(b) for b in ([first] if _difference(first, other) == 0 else [first, other])]

    def call(self, batch: Batch) -> dict[str, Any]:
        """A batch as keyword arguments of one whole forward."""
        return {**batch, "use_cache": False} if takes_cache(self.model) else dict(batch)

    def filter(self, prog: Program) -> None:
        for node in prog.nodes("linear") if self.filter_fn is not None else ():
            fqn = weight_of(node).removesuffix(".weight")
            if "scheme" in node.meta and not self.filter_fn(self.model.get_submodule(fqn), fqn):  # type: ignore[misc]
                del node.meta["scheme"]

    def unreached(self) -> Iterator[Refusal]:
        """Linears of modules that the model has and the batches do not use."""
        for name in self.unseen:
            for child, module in self.model.get_submodule(name).named_modules():
                if isinstance(module, nn.Linear):
                    yield Refusal(f"{name}.{child}".rstrip("."), "", "no recorded batch reached it")

    def solved(self, fqn: str, result: Quantized, error: float, seconds: float) -> None:
        self.solving[fqn] = (result, error, seconds)
        self.bar.set_postfix_str(fqn.removesuffix(".weight"), refresh=False)
        self.bar.refresh()

    def calibrate(self, prog: Program, nodes: dict[str, Any]) -> dict[str, InputStatistics]:
        self.bar.set_description("calibrating")
        watches = {
            fqn: Watch(
                self.model.get_submodule(fqn.removesuffix(".weight")),
                node.meta["tower"] == "language",
                node.meta["scheme"].activation,
                node.meta["scheme"].weight.needs_hessian,
                node.meta.get("outliers"),
            )
            for fqn, node in nodes.items()
            if node.meta["scheme"].activation is not None or node.meta["scheme"].weight.needs_hessian
        }
        if not watches:
            return {fqn: InputStatistics() for fqn in nodes}
        seen = calibrate(self.model, self.stepped(self.batches), watches, self.context)
        return {fqn: seen.get(fqn, InputStatistics()) for fqn in nodes}

    def stepped(self, batches: list[Batch]) -> Iterable[Batch]:
        for batch in batches:
            yield self.call(batch)
            self.bar.update()

    def to_config(self, prog: Program, nodes: dict[str, Any], statistics: dict[str, InputStatistics]) -> dict[str, Any]:
        """What ``report.config`` carries: scales and places by weight FQN, and the plan of the rewrites."""
        linears = {}
        for fqn, node in nodes.items():
            spec = node.meta["scheme"].activation
            scales = statistics[fqn].scales(spec, node.meta["tower"] == "language") if spec is not None else None
            outliers = node.meta["outliers"].tolist() if "outliers" in node.meta else []
            linears[fqn] = {
                "tower": node.meta["tower"],
                "role": node.meta["role"],
                "input_scale": scales,
                "outliers": outliers,
            }
        return {
            "visual_token_ids": list(self.context.visual_token_ids),
            "token_embeddings": _token_embeddings(prog),
            "linears": linears,
            "plan": prog.decided.to_dict(),
        }

    def measure(self, prog: Program, built: dict[str, QuantLinear]) -> dict[str, Loss]:
        self.bar.set_description("measuring")
        language = {m: prog.statistics["linears"][f"{m}.weight"]["tower"] == "language" for m in built}  # type: ignore[index]
        chosen = self.batches[:: max(1, len(self.batches) // MEASURED_BATCHES)][:MEASURED_BATCHES]
        return measure(self.model, self.stepped(chosen), built, language, self.context)

    def layers(
        self,
        prog: Program,
        built: dict[str, QuantLinear],
        statistics: dict[str, InputStatistics],
        losses: dict[str, Loss],
    ) -> list[LayerReport]:
        places, texts = prog.statistics["linears"], transforms(prog)  # type: ignore[index]
        rows = []
        for module, linear in built.items():
            fqn = f"{module}.weight"
            result, error, seconds = self.solving[fqn]
            ranges = {m: (r.low, r.high) for m, r in statistics[fqn].ranges.items() if r.count}
            scheme = next(n.meta["scheme"] for n in prog.nodes(*convert.QUANTIZED) if n.meta["fqn"] == fqn)
            outliers = 0 if linear.outlier_index is None else linear.outlier_index.numel()
            note = "; ".join(filter(None, (result.note, _one_scale(linear, statistics[fqn]))))
            rows.append(
                LayerReport(
                    module, places[fqn]["tower"], places[fqn]["role"], str(scheme), texts.get(fqn, ()), losses[module].sqnr(),
                    ranges, losses[module].saturated(), error, outliers, seconds, note,
                )
            )  # fmt: skip
        return rows

    def finish(self, config: QuantConfig, report: QuantReport) -> None:
        """Leave on the model what it needs to run, ``save_pretrained`` and ``explain``: the visual mask, the record."""
        if not any(isinstance(m, QuantLinear) and m.modality is not None for m in self.model.modules()):
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


def visual_token_ids(model: nn.Module) -> tuple[int, ...]:
    """The ids that stand for image and video features in the token ids, from the model's config."""
    config = getattr(model, "config", None)
    found = []
    for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            found.append(value)
    return tuple(dict.fromkeys(found))


def _check_model(model: nn.Module, config: QuantConfig, resume_dir: str | None) -> None:
    if not isinstance(config, QuantConfig):
        raise ConfigError(f"config is a {type(config).__name__}; pass a mmqc.QuantConfig, e.g. mmqc.recipes.mquant()")
    if resume_dir is not None:
        raise ConfigError("resume_dir is not supported yet: run without it")
    if any(isinstance(m, QuantLinear) for m in model.modules()):
        raise ValueError("this model is quantized already; load the original weights to quantize it anew")
    bad = convert.first_bad_weight(model)
    if bad is not None:
        raise ValueError(
            f"{bad} holds NaN or infinite values; repair the checkpoint before quantizing (nothing was changed)"
        )


def _spool(model: nn.Module, config: QuantConfig, calibration: Iterable[Batch] | None) -> list[Batch]:
    batches: list[Batch] = [] if calibration is None else [dict(b) for b in calibration]
    if not batches:
        given = "None" if calibration is None else "empty"
        raise CalibrationError(
            f"calibration is {given}, but this config needs data: pass an iterable of keyword batches for the model's forward "
            "(input_ids, pixel_values, ...); rewrites need one batch, static scales and gptq some dozens"
        )
    for i, batch in enumerate(batches):
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise CalibrationError(f"calibration batch {i}: {name} holds NaN or infinite values")
    wants = any(s.activation is not None and s.activation.per_modality for s in config.schemes.values())
    ids = torch.tensor(visual_token_ids(model))
    if wants and len(ids) and not any(_has_visual(b, ids) for b in batches):
        raise CalibrationError(
            "no calibration batch has an image, but the recipe has one activation scale per modality: pass batches with "
            "pixel_values and image tokens, or use msq=False"
        )
    return batches


def takes_cache(model: nn.Module) -> bool:
    """Whether the model's forward knows ``use_cache``."""
    parameters = inspect.signature(model.forward).parameters
    return "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _difference(a: Batch, b: Batch) -> int:
    """How many of two batches' tensors are in one only, or have other shapes; equal-shaped values count nothing."""
    shapes = [{n: tuple(v.shape) for n, v in batch.items() if isinstance(v, Tensor)} for batch in (a, b)]
    return 100 * len(set(shapes[0]) ^ set(shapes[1])) + sum(shapes[0][n] != shapes[1].get(n) for n in shapes[0])


def _has_visual(batch: Batch, ids: Tensor) -> bool:
    """Whether a batch has visual tokens, and features of an image or video to put there."""
    tokens, kinds = batch.get("input_ids"), batch.get("mm_token_type_ids")
    places = (
        bool(torch.isin(tokens.cpu(), ids).any())
        if tokens is not None
        else kinds is not None and bool((kinds > 0).any())
    )
    given = (
        v for name, v in batch.items() if isinstance(v, Tensor) and name not in ("inputs_embeds", "attention_mask")
    )
    return places and any(v.is_floating_point() for v in given)


def _check_keep(prog: Program, config: QuantConfig) -> None:
    """Raise a ConfigError for a pattern that means no linear of the model; ``lm_head`` is there by default."""
    linears = sorted({weight_of(n).removesuffix(".weight") for n in prog.nodes("linear") if weight_of(n)})
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


def _one_scale(linear: QuantLinear, seen: InputStatistics) -> str:
    """Why a linear has one input scale for both modalities, if calibration decided that."""
    mixed = linear.input_scale is not None and seen.ranges[MIXED].count
    return "its rows are not the tokens of the call: one scale for both modalities" if mixed else ""


def _weights_only(model: nn.Module, config: QuantConfig, filter_fn: Any, start: float) -> QuantReport:
    """No data and no rewrites: every nn.Linear module, without a recording."""
    schemes = {scheme for place, scheme in config.schemes.items() if place != "head"}
    if len(schemes) != 1:
        raise CalibrationError(
            "the towers have different schemes: pass one calibration batch, so that the towers can be told apart"
        )
    report = quantize_weights_only(model, config, schemes.pop(), filter_fn)
    report.seconds = time.perf_counter() - start
    return report
