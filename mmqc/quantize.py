"""``quantize_``: record, rewrite, calibrate, quantize, pack the cache, report; in place, and undone as a whole if anything fails.

    request   arguments, checked                                    quantization/request.py
    job       the model at work: modes, devices, undo journal       quantization/job.py
    phases    StandIns, for what is a linear by another name        quantization/stand_ins.py
              -> Recorded -> Rewritten                                 quantization/rewrite.py
              -> Targets -> Quantized, block by block               quantization/targets.py, units.py
              or Quantized, of weights alone without data           quantization/weights_only.py
              -> QuantizedKV -> QuantReport                         quantization/kv.py, finish.py

Each phase is a function from what is known before it to what is known after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from mmqc.calibration.sequential import Inputs
from mmqc.config import QuantConfig
from mmqc.distributed.group import together
from mmqc.graph.capture import unwrapped
from mmqc.nn.ordinary import ordinary, with_ordinary_tensors
from mmqc.quantization.finish import finish
from mmqc.quantization.job import working
from mmqc.quantization.kv import quantize_kv
from mmqc.quantization.left_out import complete
from mmqc.quantization.request import Batch, Filter, Request
from mmqc.quantization.rewrite import rewrite
from mmqc.quantization.stand_ins import record_linears, stand_in
from mmqc.quantization.targets import find_targets
from mmqc.quantization.units import quantize_units
from mmqc.quantization.weights_only import quantize_without_data
from mmqc.report.report import QuantReport


@ordinary()
def quantize_(
    model: nn.Module,
    config: QuantConfig,
    calibration: Iterable[Batch] | None = None,
    *,
    filter_fn: Filter | None = None,
    progress: bool = True,
    resume_dir: str | None = None,
    inputs: Inputs = "float",
    device: Any = None,
    spool: str | None = None,
    generate_tokens: int = 0,
    modality_weights: Mapping[str, float] | Literal["auto", "balanced"] | None = "auto",
    allow_nothing: bool = False,
) -> QuantReport:
    """Quantize ``model`` in place by ``config``, one block after the other; docs/howto/calibrate.md says when to use what.

    Args:
        model: any transformers model, compiled or not; parameters float32, bfloat16 or float16.
        config: a recipe, e.g. ``mmqc.recipes.mquant()``.
        calibration: keyword batches for ``model.forward``, images included; iterated once.  The first batch is also
            what the model is recorded on.  None where the config quantizes weights only and rewrites nothing.
        filter_fn: as torchao's: only linears for which ``filter_fn(module, fqn)`` is true are quantized.
        progress: show a progress bar: the block, its loss, peak memory, time left.
        resume_dir: a folder for finished blocks; the same call goes on where a killed one stopped, bit for bit.
        inputs: of linears: the ``"float"`` model's, ``"quantized"`` blocks', or these to give what float ones do, ``"asymmetric"``.
        device: the accelerator that computes while the model stays in host memory, one block at a time.
        spool: a folder for the activations between two blocks; None keeps them in host memory.
        generate_tokens: so many tokens that the model itself writes are appended to each batch.
        modality_weights: of rows, ``{"visual": a, "text": b}``; ``"balanced"``: text as images; ``"auto"``: for GPTQ in 2 bits.
        allow_nothing: return where nothing could be quantized although the config has schemes; do not raise.

    Returns:
        What was done; ``report.config`` is for ``torch.compile(..., options={"config": report.config})``.

    Raises:
        ConfigError: the config cannot be applied to this model (a ``keep`` pattern that matches nothing, ...).
        CalibrationError: no batches, or none with images where the recipe is per modality.
        NothingQuantizedError: the config has schemes, and every linear was left out; says why.
        ResumeError, OutOfMemoryError, TraceError: say what to change (MMQC_TRACE names a folder that cannot be written).
        TypeError, ValueError: the model is no module; a weight holds NaN or infinity, or the model is quantized already.
        RecordError: the forward cannot be recorded.
        RewriteError: the exact rewrites changed the output of the first batch by more than rounding.

    Whatever is raised, the model is as it was.  In a process group every rank makes this call (docs/howto/many_gpus.md).
    """
    start, model = time.perf_counter(), with_ordinary_tensors(unwrapped(model))
    given = (filter_fn, progress, resume_dir, inputs, device, spool, generate_tokens, modality_weights, allow_nothing)
    with together() as ranks, working(Request.read(model, config, calibration, *given), ranks) as job:
        request = job.request
        if request.records:
            linears = stand_in(model, job.journal)
            rewritten = rewrite(job, record_linears(job, linears))
            quantized = complete(job, linears, quantize_units(job, rewritten, find_targets(job, rewritten)))
        else:
            quantized = quantize_without_data(job)
        report = finish(job, quantized, quantize_kv(job))
        ranks.collected(())  # nobody keeps its model before all have theirs
    report.seconds = time.perf_counter() - start
    return report
