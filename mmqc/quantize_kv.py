"""The KV part of ``quantize_``: weights first, if the config has any, then the search for tau, then ``generate``.

Everything that can be refused is refused before a weight has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from .cache import check_layers, decoder_config, prepare
from .cache_generate import attach, detach
from .calibrate import CalibrationError
from .calibrate_kv import search_tau
from .config import QuantConfig, Rewrites
from .hf import MmqcConfig, attach_config
from .report import QuantReport, plain

Batch = Mapping[str, Any]


def quantize_kv(
    model: nn.Module,
    config: QuantConfig,
    calibration: Iterable[Batch] | None,
    quantize: Callable[..., QuantReport],
    **options: Any,
) -> QuantReport:
    """``quantize(model, config without kv, ...)``, then a packed cache for ``model.generate``.

    Raises:
        ConfigError: the model's cache cannot be packed, or tau is given for another number of layers.
        CalibrationError: the config searches for tau, and there is no batch to search with.
    """
    start, spec = time.perf_counter(), config.kv
    assert spec is not None
    text = decoder_config(model)
    check_layers(spec, text.num_hidden_layers)
    searches = spec.search != "none" and not spec.tau
    batches = None if calibration is None else [dict(b) for b in calibration]
    if searches and not batches:
        raise CalibrationError(
            "calibration is empty, but this kv config searches for tau: pass batches with images and answers, tau=..., or "
            "search='none'"
        )
    weights = config.replace(kv=None)
    attention, modes = text._attn_implementation, {m: m.training for m in model.modules()}
    if weights.schemes or weights.rewrites != Rewrites():
        report = quantize(model, weights, batches, **options)
    else:
        report = QuantReport(weights, [], [], [])
    model.eval()
    try:
        spec = search_tau(model, spec, batches or [], prepare(model))
        attach(model, spec)
    except BaseException:
        detach(model)
        text._attn_implementation = attention
        raise
    finally:
        for module, training in modes.items():
            module.training = training
    report.config = report.config.replace(kv=spec)
    _save(model, report.config)
    report.seconds = time.perf_counter() - start
    return report


def _save(model: Any, config: QuantConfig) -> None:
    """Let ``save_pretrained`` keep the kv config."""
    saved = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(saved, MmqcConfig):
        saved.config = plain(config.to_dict())
        saved.visual_token_ids = list(prepare(model).visual_token_ids)
    else:
        attach_config(model, config)
