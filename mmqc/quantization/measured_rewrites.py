"""Exact rewrites that look at data first: SmoothQuant's factors, ResQ's bases; and the channels that stay in more bits.

They come between the rewrites that need no data, which are in the model by then, and calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from mmqc.config import QuantConfig
from mmqc.graph.program import Program
from mmqc.quantization import convert
from mmqc.quantization.channel_peaks import mark_outliers, smooth
from mmqc.quantization.pca_bases import rotate_to_bases


def measured_rewrites(
    model: nn.Module,
    prog: Program,
    config: QuantConfig,
    batches: Callable[[], Iterable[Mapping[str, Any]]],
    journal: convert.Journal,
) -> list[str]:
    """Run those that ``config`` asks for and write them back; returns as ``convert.write_weights``."""
    untied: list[str] = []
    if config.rewrites.smooth is not None:
        smooth(model, prog, config.rewrites.smooth, batches)
        untied += convert.write_weights(model, prog, journal)
    if config.rewrites.bases is not None:
        rotate_to_bases(model, prog, config, batches)
        untied += convert.write_weights(model, prog, journal)
    if any(s.dynamic is not None and s.dynamic.high == "outliers" for s in config.schemes.values()):
        mark_outliers(model, prog, batches)
    return untied
