"""The end of ``quantize_``: what stays on the model, so that it runs and can be saved and explained, and the report."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from mmqc.checkpoint.hf import MmqcConfig, attach_config
from mmqc.config import QuantConfig
from mmqc.experts.modules import QuantExperts
from mmqc.graph.change_data import to_data
from mmqc.kv.cache import prepare
from mmqc.nn.inside import watch
from mmqc.nn.linear import QuantLinear
from mmqc.nn.modality import detach
from mmqc.nn.unseen import guard
from mmqc.quantization.convert import size_of
from mmqc.quantization.job import Job
from mmqc.quantization.kv import QuantizedKV
from mmqc.quantization.rewrite import Rewritten
from mmqc.quantization.units import Quantized
from mmqc.report.report import QuantReport, plain


def finish(job: Job, quantized: Quantized, kv: QuantizedKV) -> QuantReport:
    """Leave the config on the model, and its modality context and guards where something needs them; report."""
    model, exact = job.model, quantized.rewritten
    config = quantized.config.replace(kv=kv.spec)
    refused, date = [*quantized.refused, *kv.refused], f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    report = QuantReport(config, [*quantized.layers], refused, size_before=job.size, model=name_of(model), date=date)
    report.kv_scores = [*kv.scores]
    if exact is not None:
        report.passes, report.towers = exact.program.records, exact.towers
        report.incoherence, report.rewrite_error = exact.incoherence, exact.error
        if kv.spec is None and not _reads_modality(model):
            detach(model)
    _attach(job, config, exact)
    report.size_after = size_of(model) if job.request.changes_weights else 0
    if exact is not None:  # last, for nothing takes hooks back if something fails
        watch(model, exact.inside)
        guard(model, exact.misfits)
    return report


def name_of(model: nn.Module) -> str:
    """Its class, and what it was loaded from: a name on the hub as it is, of a folder the last part."""
    source = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    name = Path(source).name if Path(source).is_absolute() or Path(source).exists() else source
    return f"{name} ({type(model).__name__})" if name else type(model).__name__


def _reads_modality(model: nn.Module) -> bool:
    """Whether a module has one scale per modality, and so has to know the visual tokens."""
    return any(isinstance(m, QuantLinear | QuantExperts) and m.modality is not None for m in model.modules())


def _attach(job: Job, config: QuantConfig, exact: Rewritten | None) -> None:
    """Let ``save_pretrained`` keep the config, and ``explain`` know what the rewrites did."""
    model = job.model
    saved = getattr(getattr(model, "config", None), "quantization_config", None)
    if not job.request.changes_weights and isinstance(saved, MmqcConfig):  # of an earlier call, which quantized the weights
        saved.config = plain(config.to_dict())
        saved.visual_token_ids = list(prepare(model).visual_token_ids)
    elif exact is not None:
        passes = [_pass(record) for record in exact.program.records]
        changes = to_data({fqn: steps for fqn, steps in exact.program.history.items() if exact.program.weights[fqn].dim() > 1})
        record = {"passes": passes, "untied": exact.untied, "unseen": exact.misfits, "inside": exact.inside, "changes": changes}
        attach_config(model, config, record)
    else:
        attach_config(model, config, {"passes": [], "untied": []} if job.request.changes_weights else None)


def _pass(record: Any) -> dict[str, Any]:
    misses = [str(m) for m in record.misses]
    ms = round(record.ms, 1)
    return {"name": record.name, "exact": record.exact, "sites": record.sites, "misses": misses, "ms": ms, "delta": record.delta}
