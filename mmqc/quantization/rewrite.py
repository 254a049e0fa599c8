"""The exact part of ``quantize_``: record the model, rewrite the recording, write what the passes decided into the model.

    record_model     live forwards  ->  Recorded
    rewrite          passes that need no data  ->  those that look at data first (AWQ's and SmoothQuant's factors, ResQ's bases,
                     the channels that stay in more bits)  ->  Rewritten

After it the model computes what it did, up to rounding (equivalence.py), in a form that loses less when it is quantized.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.config import HEAD, ConfigError, QuantConfig
from mmqc.experts.find import products
from mmqc.graph.linear import weight_of
from mmqc.graph.program import Program
from mmqc.graph.record import record
from mmqc.graph.runner import run
from mmqc.graph.spaces.frames import Axes, deciding, seen_from
from mmqc.kv.rounding import observed, round_keys_and_values
from mmqc.nn.modality import ModalityContext, attached, detach, visual_token_ids
from mmqc.nn.unseen import Reached, unreached, unseen, unsure_weights
from mmqc.passes.assign_scheme import kept
from mmqc.pipeline import FACTS, exact_passes
from mmqc.quantization import convert
from mmqc.quantization.channel_peaks import mark_outliers, smooth
from mmqc.quantization.channel_scales import Forwards, scale_channels
from mmqc.quantization.equivalence import Before, check, precision
from mmqc.quantization.incoherence import incoherences, weight_towers
from mmqc.quantization.job import Job, takes_cache
from mmqc.quantization.pca_bases import rotate_to_bases
from mmqc.quantization.request import Batch

LOOKED_AT = 16
DECIDES = "Python looks at values in {}, which sees what this weight reads or writes, and may go another way by them"


@dataclass(frozen=True, eq=False)
class Recorded:
    """A model whose forward is known.

    Attributes:
        program: the recording; the phases rewrite it, as they do the model.
        context: tells visual from text rows; attached to the model.
        unseen: modules and parameters that no recorded batch reached, and the axes of weights whose spaces are seen where they are.
    """

    program: Program
    context: ModalityContext
    unseen: Mapping[str, Axes]


@dataclass(frozen=True, eq=False)
class Rewritten(Recorded):
    """A recorded model after the exact rewrites, which are written into it.

    Attributes:
        misfits: those of the unseen that must not run any more, for what they would read or write is not what it was.
        inside: modules that hold others and give something else than they did.
        towers: the tower of every linear weight.
        incoherence: μ of each of these weights before and after.
        error: how far the rewrites moved the model's output, relative.
        untied: names whose tensor was shared with another name and is not any more.
    """

    misfits: tuple[str, ...]
    inside: tuple[str, ...]
    towers: dict[str, str]
    incoherence: dict[str, tuple[float, float]]
    error: float
    untied: tuple[str, ...]


def record_model(job: Job) -> Recorded:
    """Record the two batches that differ most, and those that reach what these two do not.

    Raises:
        RecordError: the forward cannot be recorded.
    """
    model, context = job.model, attached(job.model)
    if context is None:
        context = ModalityContext.attach(model, visual_token_ids(model))
        job.journal.note(lambda: detach(model))
    job.journal.attribute(context, "text_only", not context.visual_token_ids)
    batches, decode = job.differing(), takes_cache(model)
    prog = record(model, *map(job.call, batches), decode=decode)
    reached = Reached.by(prog.called, prog.weights.values())
    more = _reaching(job, batches, unreached(model, reached))
    if more:
        prog = record(model, *map(job.call, (*batches, *more)), decode=decode)
        reached = Reached.by(prog.called, prog.weights.values())
    prog.work = job.residency.device if job.residency.offloads else None
    prog.unsure = unsure_weights(model, reached)
    frames, decide = {name: _frame(prog, name) for name in unseen(model, reached)}, deciding(prog)
    seen = seen_from(prog, {*frames.values(), *decide})
    if decide:
        # Whatever way its Python goes, it is handed the model's own values and gives them back.
        prog.unsure |= {fqn: DECIDES.format(frame or "the model") for frame in sorted(decide) for fqn, _ in seen[frame]}
        prog.analysis = None
    return Recorded(prog, context, {name: seen[frame] for name, frame in frames.items()})


def _reaching(job: Job, known: list[Batch], modules: list[str]) -> list[Batch]:
    """Of the first ``LOOKED_AT`` other batches, those that run one of ``modules`` as the first."""
    found: list[Batch] = []
    left = set(modules)
    for batch in [b for b in job.batches if not any(b is k for k in known)][:LOOKED_AT] if left else ():
        ran: set[str] = set()
        places = [(name, job.model.get_submodule(name)) for name in left]
        handles = [module.register_forward_pre_hook(functools.partial(_note, ran, name)) for name, module in places]
        try:
            with torch.no_grad():
                job.forward(batch)
        finally:
            for handle in handles:
                handle.remove()
        found += [batch] if ran else []
        left -= ran
        if not left:
            break
    return found


def _note(ran: set[str], name: str, *call: Any) -> None:
    ran.add(name)


def rewrite(job: Job, recorded: Recorded) -> Rewritten:
    """Run the exact passes and write what they decided into the model.

    Raises:
        ConfigError: a ``keep`` pattern matches no linear; or keys cannot be rounded.
        RewriteError: the model's output on some batch moved by more than rounding.
    """
    model, prog, config = job.model, recorded.program, job.request.config
    run(prog, exact_passes(config), FACTS, text=True)
    _check_keep(prog, config)
    _filter(job, prog)
    before, towers = incoherences(prog), weight_towers(prog)
    scales, smoothed = config.rewrites.scales, config.rewrites.smooth
    changes, dtype = bool(prog.changed) or scales is not None or smoothed is not None, precision(prog)
    frames = {name: _frame(prog, name) for name in recorded.unseen}
    compared = job.ranks.mine(job.compared()) if changes else []
    answers = Before.of(model, [job.call(batch) for batch in compared], frames.values())
    untied = convert.write_exact(model, prog, job.journal)
    if scales is not None:
        job.bar.say("scaling channels")
        scale_channels(model, prog, scales, _forwards(job, recorded))
        untied += convert.write_weights(model, prog, job.journal)
    with ExitStack() as stack:
        kv = config.kv_rounding
        keys = stack.enter_context(observed(model, kv)) if kv is not None else {}
        untied += _measured_rewrites(job, prog)
        counted = kv is not None and kv.basis in ("principal", "peaks")
        # The forwards that find bases went through the keys too, which no basis changes.
        if kv is not None and config.rewrites.bases is None:
            with torch.no_grad():
                for batch in job.ranks.mine(job.batches) if counted else job.batches[:1]:
                    job.forward(batch)
    error = check(model, answers, dtype, job.ranks)
    if kv is not None:
        round_keys_and_values(model, kv, _of_all(job, keys, kv.basis == "peaks"), config.rewrites.seed, job.journal)
    # all weights are read for it: 9 s of two CPU cores for 3e9 of them
    after = incoherences(prog) if changes or config.rewrites.bases is not None else before
    both = {fqn: (before[fqn], after[fqn]) for fqn in before}
    known = (prog, recorded.context, recorded.unseen)
    moved = set(job.ranks.collected(sorted(answers.handed.changed(dtype))))
    misfits = tuple(name for name, axes in recorded.unseen.items() if axes & prog.touched or frames[name] in moved)
    inside = next(iter(job.ranks.collected([tuple(answers.handed.inside(dtype))] if compared else [])), ())  # in the first call
    return Rewritten(*known, misfits, inside, towers, both, error, tuple(untied))


def _of_all(job: Job, keys: Mapping[nn.Module, Tensor], peaks: bool) -> dict[nn.Module, Tensor]:
    """What all ranks saw of the keys, in the model's order."""
    names = {module: name for name, module in job.model.named_modules() if module in keys}
    named = {name: keys[module] for module, name in names.items()}
    found = job.ranks.largest(named) if peaks else job.ranks.summed(named)
    return {job.model.get_submodule(name): found[name] for name in found}


def _frame(prog: Program, name: str) -> str:
    """The innermost module around ``name`` that ran: lists do not, nor does what is used by its methods alone."""
    holder = name.rpartition(".")[0]
    return holder if not holder or holder in prog.called else _frame(prog, holder)


def _measured_rewrites(job: Job, prog: Program) -> list[str]:
    """Those rewrites that look at data first and are written back at once; returns as ``convert.write_weights``."""
    model, config, untied = job.model, job.request.config, []
    batches, ranks = lambda: map(job.call, job.ranks.mine(job.batches)), job.ranks
    if config.rewrites.smooth is not None:
        smooth(model, prog, config.rewrites.smooth, batches, ranks)
        untied += convert.write_weights(model, prog, job.journal)
    if config.rewrites.bases is not None:
        rotate_to_bases(model, prog, config, batches, ranks)
        untied += convert.write_weights(model, prog, job.journal)
    if any(s.dynamic is not None and s.dynamic.high == "outliers" for s in config.schemes.values()):
        mark_outliers(model, prog, batches, ranks)
    return untied


def _forwards(job: Job, recorded: Recorded) -> Forwards:
    """How the search for channel scales runs the model."""
    calls, differing = job.forwards(job.batches), job.forwards(job.differing())
    request = job.request
    return Forwards(
        calls, differing, recorded.context, job.residency, request.row_weights.others, request.spool, job.bar.say, job.ranks
    )


def _check_keep(prog: Program, config: QuantConfig) -> None:
    """Raise a ConfigError for a pattern that means no linear of the model; ``lm_head`` is there by default."""
    linears = sorted({weight_of(n).removesuffix(".weight") for n in prog.nodes("linear") if weight_of(n)})
    linears += sorted(fqn for uses in products(prog).values() for fqn in uses)
    for pattern in config.keep:
        if pattern != HEAD and not any(kept(pattern, fqn, "") for fqn in linears):
            raise ConfigError(
                f"keep pattern {pattern!r} matches no linear of this model; some of its linears: {linears[:3]} ... {linears[-2:]}"
            )


def _filter(job: Job, prog: Program) -> None:
    """Take the scheme from linears that the caller does not want quantized."""
    wanted = job.request.filter_fn
    for node in prog.nodes("linear") if wanted is not None else ():
        fqn = weight_of(node).removesuffix(".weight")
        if "scheme" in node.meta and not wanted(job.model.get_submodule(fqn), fqn):  # type: ignore[misc]
            del node.meta["scheme"]
