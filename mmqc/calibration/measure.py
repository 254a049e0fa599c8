"""How much each quantized linear loses: its output against the float linear's, on equal inputs, per modality."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import by_modality
from mmqc.calibration.observe import linear_input
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.modality import ModalityContext


@dataclass
class Loss:
    """Running signal and noise power, and clipped inputs, by modality."""

    signal: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def sqnr(self) -> dict[str, float]:
        """10 log10(signal / noise) in dB."""
        pairs = ((m, self.signal[m], self.noise[m]) for m in self.signal)
        return {m: 10 * math.log10(s / n) if s > 0 and n > 0 else math.inf for m, s, n in pairs if s > 0}

    def relative(self) -> float:
        """Noise power over signal power, all modalities together."""
        signal = sum(self.signal.values())
        return sum(self.noise.values()) / signal if signal else 0.0

    def saturated(self) -> dict[str, float]:
        """Share of input values beyond the static range."""
        return {m: self.clipped[m] / n for m, n in self.count.items() if n}


class Meter:
    """The calls of one linear, compared with those of its quantized self; see ``loss``."""

    def __init__(self, linear: nn.Module, quantized: PackedLinear, language: bool, context: ModalityContext | None) -> None:
        self.linear, self.quantized, self.language, self.context, self.loss = linear, quantized, language, context, Loss()

    def update(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Compare on one call's input."""
        x = args[0].detach()
        rotated = linear_input(self.linear, x)
        wanted = nn.functional.linear(rotated, self.linear.weight, self.linear.bias)  # type: ignore[arg-type]
        error = self.quantized(x) - wanted
        for total, y in ((self.loss.signal, wanted), (self.loss.noise, error)):
            for name, rows in by_modality(y, self.language, self.context).items():
                total[name] = total.get(name, 0.0) + _power(rows)
        if self.quantized.input_scale is not None:
            self.count_clipped(rotated, self.quantized.input_scale)

    def count_clipped(self, x: Tensor, scale: Tensor) -> None:
        """Count input values beyond the static range."""
        if self.quantized.outlier_index is not None:
            x = x.index_fill(-1, self.quantized.outlier_index, 0)
        for name, rows in by_modality(x, self.language, self.context).items():
            s = scale[1 if name == "visual" and scale.numel() == 2 else 0]
            beyond = ((rows / s).round() > 127) | ((rows / s).round() < -128)
            self.loss.clipped[name] = self.loss.clipped.get(name, 0) + int(beyond.sum())
            self.loss.count[name] = self.loss.count.get(name, 0) + rows.numel()


def _power(x: Tensor) -> float:
    """Σ x² in float64, without a copy in it."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
