"""``quantize_``: record, rewrite, calibrate, quantize, convert; in place, and undone as a whole if anything fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mmqc.calibration.blocks import block_lists
from mmqc.calibration.calibrate import EQUAL, TEXT, VISUAL, CalibrationError
from mmqc.calibration.generated import with_generated
from mmqc.calibration.residency import Residency
from mmqc.calibration.sequential import Inputs
from mmqc.config import ConfigError, QuantConfig
from mmqc.kv.scores import with_scores
from mmqc.nn.eval_mode import evaluating
from mmqc.nn.integer_weight import IntegerWeight
from mmqc.nn.modality import ModalityContext, attached, detach, visual_token_ids
from mmqc.quantization import convert
from mmqc.quantization.job import Job
from mmqc.quantization.kv import quantize_kv
from mmqc.quantization.memory_error import explained
from mmqc.quantization.options import Batch, Last, Options
from mmqc.quantization.progress import Progress
from mmqc.quantization.resume import Store, fingerprint
from mmqc.quantization.weights_only import quantize_weights_only
from mmqc.report.report import QuantReport


def quantize_(
    model: nn.Module,
    config: QuantConfig,
    calibration: Iterable[Batch] | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    progress: bool = True,
    resume_dir: str | None = None,
    inputs: Inputs = "float",
    device: Any = None,
    spool: str | None = None,
    generate_tokens: int = 0,
    modality_weights: Mapping[str, float] | None = None,
) -> QuantReport:
    """Quantize ``model`` in place by ``config``, one block after the other; docs/howto/calibrate.md says when to use what.

    Args:
        model: any transformers model; parameters float32, bfloat16 or float16.
        config: a recipe, e.g. ``mmqc.recipes.mquant()``.
        calibration: keyword batches for ``model.forward``, images included; iterated once.  The first batch is also
            what the model is recorded on.  None where the config quantizes weights only and rewrites nothing.
        filter_fn: as torchao's: only linears for which ``filter_fn(module, fqn)`` is true are quantized.
        progress: show a progress bar: the block, its loss, peak memory, time left.
        resume_dir: a folder for finished blocks; the same call goes on where a killed one stopped, bit for bit.
        inputs: linears are calibrated on what the ``"float"`` model feeds them, or the ``"quantized"`` blocks in front.
        device: the accelerator that computes while the model stays in host memory, one block at a time.
        spool: a folder for the activations between two blocks; None keeps them in host memory.
        generate_tokens: so many tokens that the model itself writes are appended to each batch.
        modality_weights: what a row counts in second moments, ``{"visual": a, "text": b}``; 1 if not given.

    Returns:
        What was done; ``report.config`` is for ``torch.compile(..., options={"config": report.config})``.

    Raises:
        ConfigError: the config cannot be applied to this model (a ``keep`` pattern that matches nothing, ...).
        CalibrationError: no batches, or none with images where the recipe is per modality.
        ResumeError, OutOfMemoryError: say what to change.
        ValueError: a weight holds NaN or infinity, or the model is quantized already.
        RecordError: the forward cannot be recorded.
        RewriteError: the exact rewrites changed the output of the first batch by more than rounding.

    Whatever is raised, the model is as it was.
    """
    more: dict[str, Any] = {
        "filter_fn": filter_fn,
        "progress": progress,
        "resume_dir": resume_dir,
        "inputs": inputs,
        "device": device,
        "spool": spool,
        "generate_tokens": generate_tokens,
        "modality_weights": modality_weights,
    }
    if isinstance(config, QuantConfig) and config.kv is not None:
        return with_scores(quantize_kv, model, config, calibration, _quantize_weights, **more)
    return _quantize_weights(model, config, calibration, **more)


def _quantize_weights(
    model: nn.Module,
    config: QuantConfig,
    calibration: Iterable[Batch] | None,
    *,
    filter_fn: Any,
    progress: bool,
    modality_weights: Mapping[str, float] | None,
    then: Last | None = None,
    **more: Any,
) -> QuantReport:
    """``quantize_`` of anything but the cache; what ``then`` raises undoes it as well."""
    start = time.perf_counter()
    _check_model(model, config)
    options = Options(row_weights=_row_weights(modality_weights), then=then, **more)
    _check_options(options)
    if calibration is None and config.rewrites == type(config.rewrites)() and not config.needs_calibration:
        report = _weights_only(model, config, filter_fn, options.device)
    else:
        report = _calibrated(model, config, _spool(model, config, calibration), filter_fn, progress, options)
    report.seconds = time.perf_counter() - start
    return report


def _calibrated(
    model: nn.Module, config: QuantConfig, batches: list[Batch], filter_fn: Any, progress: bool, options: Options
) -> QuantReport:
    """With the modes, hooks and devices that the job needs; all of them are as they were afterwards."""
    before = convert.size_of(model)
    context = attached(model) or ModalityContext.attach(model, visual_token_ids(model))
    try:
        context.text_only = not context.visual_token_ids
        with evaluating(model), ExitStack() as stack:
            bar = stack.enter_context(Progress(progress, options.device or next(model.parameters()).device))
            stack.enter_context(explained(bar))
            store = _store(model, config, batches, options)
            linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            blocks = [child for children in block_lists(model, linears).values() for child in children]
            residency = stack.enter_context(Residency(model, blocks, options.device))
            if options.generate_tokens:
                bar.say("generating")
                ids, count = context.visual_token_ids, options.generate_tokens
                batches = [with_generated(model, residency.batch(dict(b)), count, ids) for b in batches]
            journal = stack.enter_context(convert.Journal(model))
            job = Job(model, config, batches, context, journal, bar, filter_fn, options, residency, store)
            stack.callback(job.forget)
            report = job.run()
            report.size_before, report.size_after = before, convert.size_of(model)
    except BaseException:
        detach(model)
        raise
    return report


def _row_weights(given: Mapping[str, float] | None) -> dict[str, float]:
    wrong = [m for m, w in (given or {}).items() if m not in (TEXT, VISUAL) or not 0 < w < float("inf")]
    if wrong:
        raise ConfigError(
            f"modality_weights = {dict(given or {})}: {wrong[0]!r} is no modality, or its weight is not positive; "
            f'pass {{"{VISUAL}": a, "{TEXT}": b}} with positive numbers'
        )
    return {**EQUAL, **(given or {})}


def _check_options(options: Options) -> None:
    if options.inputs not in get_args(Inputs):
        raise ConfigError(f"inputs = {options.inputs!r} is not supported; allowed: {get_args(Inputs)}")
    count = options.generate_tokens
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"generate_tokens = {count!r}: how many tokens to append to each batch, 0 or more")


def _store(model: nn.Module, config: QuantConfig, batches: list[Batch], options: Options) -> Store | None:
    """Where finished units are kept, if anywhere."""
    if options.resume_dir is None:
        return None
    asked = (options.inputs, options.generate_tokens, dict(options.row_weights))
    return Store(options.resume_dir, fingerprint(model, config.to_dict(), batches, asked))


def _check_model(model: nn.Module, config: QuantConfig) -> None:
    if not isinstance(config, QuantConfig):
        raise ConfigError(f"config is a {type(config).__name__}; pass a mmqc.QuantConfig, e.g. mmqc.recipes.mquant()")
    if any(isinstance(m, IntegerWeight) for m in model.modules()):
        raise ValueError("this model is quantized already; load the original weights to quantize it anew")
    bad = convert.first_bad_weight(model)
    if bad is not None:
        raise ValueError(f"{bad} holds NaN or infinite values; repair the checkpoint before quantizing (nothing was changed)")


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


def _has_visual(batch: Batch, ids: Tensor) -> bool:
    """Whether a batch has visual tokens, and features of an image or video to put there."""
    tokens, kinds = batch.get("input_ids"), batch.get("mm_token_type_ids")
    places = bool(torch.isin(tokens.cpu(), ids).any()) if tokens is not None else kinds is not None and bool((kinds > 0).any())
    given = (v for name, v in batch.items() if isinstance(v, Tensor) and name not in ("inputs_embeds", "attention_mask"))
    return places and any(v.is_floating_point() for v in given)


def _weights_only(model: nn.Module, config: QuantConfig, filter_fn: Any, device: Any) -> QuantReport:
    """No data and no rewrites: every nn.Linear module, without a recording."""
    schemes = {scheme for place, scheme in config.schemes.items() if place != "head"}
    if len(schemes) != 1:
        raise CalibrationError(
            "the towers have different schemes: pass one calibration batch, so that the towers can be told apart"
        )
    return quantize_weights_only(model, config, schemes.pop(), filter_fn, device)
