"""Round to nearest with the clip that loses least in weight space.

    s = argmin over p of  sum_k |w_k - s_p round(w_k / s_p)|^2.4
    s_p = p s_1        p = 1, 0.99, ..., 0.21        s_1 reaches every value of the row, or of the group (grid.py)

Where zero lies between the codes, each end has a clip of its own, of 1, 0.95, ..., 0.35 (both_ends.py).


Shapes:  w [N, K]    s [N] or [N, ceil(K/g)]    q int8 [N, K]
Source:  QuaRot's weight quantizer, which MQuant uses unchanged: norm 2.4, grid 100, maxshrink 0.8 (80 steps).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.config import WeightSpec
from mmqc.solvers.both_ends import best_ends
from mmqc.solvers.clip import best_clip, row_blocks
from mmqc.solvers.grid import Grid, grouped, on_grid
from mmqc.solvers.quantized import Quantized, checked
from mmqc.solvers.widest import widest_grid

NORM = 2.4
SHRINKS = tuple(1 - step / 100 for step in range(80))
ENDS = tuple(1 - step / 20 for step in range(14))


def clipped(groups: Tensor, spec: WeightSpec, cost: Tensor | None = None, divisor: Tensor | None = None) -> Grid:
    """The grid of each group of [N, G, g] that minimises the 2.4th power of the rounding error, times ``cost`` [G, g].

    ``divisor``: as of ``widest_grid``.
    """
    widest = widest_grid(groups, spec, divisor)
    power = partial(_power, cost=1.0 if cost is None else cost)
    if spec.float4:
        return best_clip(groups, widest, SHRINKS, power)
    if spec.float_zero:
        return best_ends(groups, widest, ENDS, power)
    blocks, scales = row_blocks(groups, widest.scale)
    zeros = [None] * len(blocks) if widest.zero is None else row_blocks(groups, widest.zero)[1]
    factors = [
        torch.ops.mmqc.power_clip(block, scale, zero, cost, SHRINKS, NORM, spec.bits)
        for block, scale, zero in zip(blocks, scales, zeros, strict=True)
    ]
    return widest.shrunk(torch.cat(factors)) if factors else widest


def _power(error: Tensor, cost: Tensor | float) -> Tensor:
    return error.abs_().pow_(NORM).mul_(cost).sum(-1)


def solve(
    weight: Tensor, spec: WeightSpec, hessian: Tensor | None = None, *, skip: Tensor | None = None, name: str = "weight"
) -> Quantized:
    """Quantizes ``weight`` with the clip, per output channel or group, that minimises the error's 2.4-norm.

    Arguments and errors are those of ``rtn.solve``.
    """
    w = checked(weight, name, skip)
    groups = grouped(w, spec.group_size)
    return on_grid(groups, clipped(groups, spec), w.shape[1], spec.group_size)
