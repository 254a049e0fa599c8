"""Round to nearest: the largest magnitude of a row, or of a group, becomes the largest code.

    s = max|w| / (2^(b-1) - 1)        q = round(w / s)             asymmetric: see grid.py

Shapes:  w [N, K]    s [N] or [N, ceil(K/g)]    q int8 [N, K]
Error:   |w - q s| <= s/2 for every element
"""

from __future__ import annotations

from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.solvers.grid import Grid, grouped, on_grid
from mmqc.solvers.quantized import Quantized, checked


def solve(
    weight: Tensor, spec: WeightSpec, hessian: Tensor | None = None, *, skip: Tensor | None = None, name: str = "weight"
) -> Quantized:
    """Quantizes ``weight`` by rounding to nearest.

    Args:
        weight: floating point [N, K].
        spec: bits, granularity and symmetry are read; a last group may be short.
        hessian: not used; every solver takes the same arguments.
        skip: int64 indices of input channels that something else computes; their values are 0.
        name: FQN for error messages.

    Raises:
        ValueError: NaN or infinite values.
    """
    w = checked(weight, name, skip)
    groups = grouped(w, spec.group_size)
    return on_grid(groups, Grid.of(groups, spec.bits, spec.symmetric), w.shape[1], spec.group_size)
