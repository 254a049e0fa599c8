"""The KV part of ``quantize_``: weights first, if the config has any, then the search for tau, then ``generate``.

What can be refused beforehand is refused before a weight has changed.  The search runs on the quantized weights, and while they
can still be taken back: if it fails, the model is as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mmqc import kernels
from mmqc.calibration.calibrate import CalibrationError
from mmqc.checkpoint.hf import MmqcConfig, attach_config
from mmqc.config import KVSpec, QuantConfig, Rewrites
from mmqc.kv.cache import check_spec, decoder_config, head_width, prepare
from mmqc.kv.calibrate import observe_queries, search_tau
from mmqc.kv.generate import attach, detach
from mmqc.kv.query_moment import kept_on_failure
from mmqc.nn.eval_mode import evaluating
from mmqc.nn.modality import attached
from mmqc.nn.modality import detach as forget_modality
from mmqc.report.report import QuantReport, Refusal, plain

Batch = Mapping[str, Any]


def quantize_kv(
    model: nn.Module, config: QuantConfig, calibration: Iterable[Batch] | None, quantize: Callable[..., QuantReport], **options: Any
) -> QuantReport:
    """``quantize(model, config without kv, batches, then=..., ...)``, and a packed cache for ``model.generate``.

    ``quantize`` calls ``then`` with what puts a batch on the right device, when its work is done and can still be undone.

    Raises:
        ConfigError: the model's cache cannot be packed, or tau is given for another number of layers.
        CalibrationError: the config searches for tau, and there is no batch to search with.
    """
    start, spec = time.perf_counter(), config.kv
    assert spec is not None
    text = decoder_config(model)
    check_spec(spec, text)
    batches = None if calibration is None else [dict(b) for b in calibration]
    if (spec.searches or spec.rounding == "queries") and not batches:
        raise CalibrationError(
            "calibration is empty, but this kv config searches for tau or rounds keys by queries: pass batches with images and "
            "answers, or search='none', rounding='nearest'"
        )
    weights, found = config.replace(kv=None), spec

    def search(place: Callable[[dict[str, Any]], Batch]) -> None:
        nonlocal found
        given, context = [place(batch) for batch in batches or []], prepare(model)
        observe_queries(model, spec, given, context)
        found = search_tau(model, spec, given, context)

    with _undone(model, text), kept_on_failure(model):
        if weights.schemes or weights.rewrites != Rewrites() or weights.kv_rounding is not None:
            report = quantize(model, weights, batches, then=search, **options)
        else:
            report = QuantReport(weights, [], [], [])
            with evaluating(model):
                search(dict)
        attach(model, found)
    report.config = report.config.replace(kv=found)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    place = (embedding.device, embedding.dtype, head_width(text))
    report.refused += [Refusal("", "", why) for why in unfused(found, *place)]
    _save(model, report.config)
    report.seconds = time.perf_counter() - start
    return report


def unfused(spec: KVSpec, device: torch.device, dtype: torch.dtype, width: int) -> Iterator[str]:
    """What of the cache of a decoder with heads of ``width`` channels runs in many launches, for want of a kernel, and why."""
    why = why_plain(spec, device, dtype, width)
    if spec.rounding == "queries" and why[0]:
        yield f"KV cache: keys are rounded by plain torch code (kv_round_keys), once for each image's tokens: {why[0]}"
    if spec.text_bits < 16 and why[1]:
        yield f"KV cache: text older than the window is read by plain torch code (kv_token_attention) in every step: {why[1]}"


def why_plain(spec: KVSpec, device: torch.device, dtype: torch.dtype, width: int) -> tuple[str | None, str | None]:
    """Why there is no kernel that rounds keys for queries, and none that reads rounded text; None where there is."""
    if device.type != "cuda":
        here = f"the model is on {device.type}"
        return here, here
    if not kernels.install():
        none = "this installation has no Triton kernels"
        return none, none
    from mmqc.kernels import kv_on_cuda as on_cuda  # imports Triton

    text = on_cuda.why_not_text(dtype, width, spec.text_bits, spec.text_block) if spec.text_bits < 16 else None
    return on_cuda.why_not_rounded(dtype, width), text


@contextmanager
def _undone(model: nn.Module, text: Any) -> Iterator[None]:
    """Take back what ``prepare`` and ``attach`` did if anything fails."""
    attention, context = text._attn_implementation, attached(model)
    try:
        yield
    except BaseException:
        detach(model)
        text._attn_implementation = attention
        if context is None:
            forget_modality(model)
        raise


def _save(model: Any, config: QuantConfig) -> None:
    """Let ``save_pretrained`` keep the kv config."""
    saved = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(saved, MmqcConfig):
        saved.config = plain(config.to_dict())
        saved.visual_token_ids = list(prepare(model).visual_token_ids)
    else:
        attach_config(model, config)
