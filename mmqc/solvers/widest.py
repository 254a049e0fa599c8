"""The widest grid of every group of a weight, of the type that its spec says, and a weight rounded to it."""

from __future__ import annotations

from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.solvers.float4_grid import Float4Grid
from mmqc.solvers.grid import Grid, grouped


def widest_grid(groups: Tensor, spec: WeightSpec, divisor: Tensor | None = None) -> Grid:
    """The grids that reach the largest values of groups [N, G, g]; an e2m1 one may fall short of them by half a step.

    ``divisor``: nvfp4's for the whole tensor, where the groups are a part of it.
    """
    if spec.type == "mxfp4" or spec.type == "nvfp4":
        return Float4Grid.widest(groups, spec.type, divisor)
    return Grid.of(groups, spec.bits, spec.symmetric, spec.float_zero)


def widest(w: Tensor, spec: WeightSpec) -> Tensor:
    """The values float32 that W [N, K] is rounded to on those."""
    groups = grouped(w, spec.group_size)
    grid = widest_grid(groups, spec)
    return grid.values(grid.codes(groups).float()).flatten(1)[:, : w.shape[1]]
