"""The cache part of ``quantize_``: the search for the layers' bits and for tau, then a packed cache for ``generate``.

What can be refused beforehand is refused before a weight has changed (request.py).  The search runs on the quantized weights while
they can still be taken back: if it fails, the model is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mmqc import kernels
from mmqc.config import KVSpec
from mmqc.kv.cache import SPEC, decoder_config, head_width, prepare
from mmqc.kv.calibrate import observe_queries, search_tau
from mmqc.kv.generate import METHOD, attach, detach
from mmqc.kv.layer_bits import search_bits
from mmqc.kv.query_moment import restorer
from mmqc.kv.scores import histograms
from mmqc.nn.modality import attached
from mmqc.nn.modality import detach as forget_modality
from mmqc.quantization.convert import Journal
from mmqc.quantization.job import Job
from mmqc.report.report import Refusal
from mmqc.report.score_histogram import ScoreHistogram


@dataclass(frozen=True)
class QuantizedKV:
    """How ``generate`` packs its cache.

    Attributes:
        spec: with the tau and the layers' bits that were found; None for a cache of the model's dtype.
        scores: by layer, of visual tokens on one calibration batch.
        refused: what runs without a kernel, and why.
    """

    spec: KVSpec | None = None
    scores: tuple[ScoreHistogram, ...] = ()
    refused: tuple[Refusal, ...] = ()


def quantize_kv(job: Job) -> QuantizedKV:
    """Search for tau, and let ``model.generate`` pack its cache, if the request says so.

    Raises:
        CalibrationError: no batch has visual tokens with text behind them, which the spec needs.
    """
    spec, model = job.request.kv, job.model
    if spec is None or job.seen is None:
        return QuantizedKV()
    job.bar.say("searching")
    _note(model, job.journal)
    batches, context = [job.place(batch) for batch in job.request.batches or ()], prepare(model)
    observe_queries(model, spec, batches, context, ranks=job.ranks)
    spec = search_bits(model, spec, batches, context, ranks=job.ranks)
    found = search_tau(model, spec, batches, context, ranks=job.ranks)
    attach(model, found)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    home = job.residency.home if job.residency.offloads else embedding.device
    refused = unfused(found, home, embedding.dtype, head_width(decoder_config(model)))
    return QuantizedKV(found, tuple(histograms(job.seen, found)), tuple(Refusal("", "", why) for why in refused))


def _note(model: nn.Module, journal: Journal) -> None:
    """Let the journal take back what ``prepare``, ``observe_queries`` and ``attach`` do."""
    text, context, moments = decoder_config(model), attached(model), restorer(model)
    attention = text._attn_implementation
    packed = {name: model.__dict__[name] for name in (SPEC, METHOD) if name in model.__dict__}

    def undo() -> None:
        moments()
        detach(model)
        model.__dict__.update(packed)
        text._attn_implementation = attention
        if context is None:
            forget_modality(model)

    journal.note(undo)


def unfused(spec: KVSpec, device: torch.device, dtype: torch.dtype, width: int) -> Iterator[str]:
    """What of the cache of a decoder with heads of ``width`` channels runs in many launches, for want of a kernel, and why."""
    why = why_plain(spec, device, dtype, width)
    few = min(spec.layer_bits, default=1) <= 2  # of a layer that rounds by queries
    if spec.rounding == "queries" and few and why[0]:
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
