"""How the attention scores of a layer's visual tokens are distributed, before and after their keys are rounded.

    exact        t q kᵀ
    rounded      t q k'ᵀ                     k' = Q(k) as a packed cache stores it
    calibrated   g(t q k'ᵀ)                  the map g of ops/kv_attention.py, where the layer has a tau

Source:  CalibQuant, arXiv:2502.14882, Figures 1 (the distributions) and 2 (the error of the softmax).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXACT, ROUNDED, CALIBRATED = "exact", "rounded", "calibrated"


@dataclass(frozen=True)
class ScoreHistogram:
    """One layer.

    Attributes:
        layer: its number in the decoder.
        bits: of the rounded keys.
        low: the smallest score of the three kinds.
        high: and the largest.
        counts: scores in equal bins from ``low`` to ``high``, by kind; all query heads together.
        tau: (τ₁, τ₂) of the map g.
        error: mean squared error of the softmax over the visual tokens, for "rounded" and "calibrated".
    """

    layer: int
    bits: int
    low: float
    high: float
    counts: dict[str, list[int]] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    tau: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ScoreHistogram:
        """What ``dataclasses.asdict`` wrote."""
        return cls(**{**data, "tau": tuple(data["tau"])})

    def error_of(self, kind: str) -> float:
        """Of a layer that is not calibrated, "calibrated" is "rounded"."""
        return self.error.get(kind, self.error[ROUNDED])

    def outside(self, kind: str) -> float:
        """The share of the scores that are beyond every exact score, likewise."""
        exact, other = self.counts[EXACT], self.counts.get(kind, self.counts[ROUNDED])
        used = [i for i, n in enumerate(exact) if n]
        inside = sum(other[used[0] : used[-1] + 1]) if used else 0
        return 1 - inside / max(sum(other), 1)
