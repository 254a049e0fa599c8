"""Round to nearest: a step that no value of a row, or of a group, misses by more than half of it.

    asymmetric    see grid.py; q = round(w (1 / s)) + z, as torchao multiplies: a weight halfway between two codes takes the one
                  that it takes there.  Zero between the codes: q as in grid.py
    floats        of 4 bits: the best of the steps of float4_grid.py by sum_k (w_k - s q_k)²
    symmetric     q = round(w / s), the best of these steps by sum_k (w_k - s q_k)²; the first one of equals, and for 8 bits

        s = max|w| / (2^(b-1) - 1)                              the largest magnitude becomes the largest code
        s = 2 max|w| / (2^b - 1)                                it lies half a step behind the last code on one side
        s = max(max w / (2^(b-1) - 1), -min w / 2^(b-1))        both ends become the last codes of their sides
        s = max|w| / 2^(b-1)                                    for 2 bits: it becomes the lowest code, or is clipped to the highest

Shapes:  w [N, K]    s [N] or [N, ceil(K/g)]    q int8 [N, K]
Error:   |w - q s| <= s/2 for every element, but for 2 bits s where a positive one is clipped
Why:     the second step is torchao's and LLM Compressor's "symmetric", the third torchao's "symmetric, no clipping error".  At 2
         and 3 bits the lowest code of the first is never used; which step is best differs from group to group.  With four
         levels the first three steps are too long for most values; the fourth takes 30 % off the squared error in groups of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.ops.divide import divided
from mmqc.solvers.clip import best_clip, row_blocks
from mmqc.solvers.grid import Grid, grouped, on_grid, packed
from mmqc.solvers.quantized import Quantized, checked, levels
from mmqc.solvers.widest import widest_grid

NO_TIE = 1 + 2**-20  # the second step is longer by this: its largest magnitude would lie just between two codes
SHORTER = 1 - 2**-20  # what the third step is at most: where it is the first one, rounding alone would tell them apart


def solve(
    weight: Tensor,
    spec: WeightSpec,
    hessian: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    name: str = "weight",
    clip: bool = True,
) -> Quantized:
    """Quantizes ``weight`` by rounding to nearest.

    Args:
        weight: floating point [N, K].
        spec: bits, granularity and symmetry are read; a last group may be short.
        hessian: not used; every solver takes the same arguments.
        skip: int64 indices of input channels that something else computes; their values are 0.
        name: FQN for error messages.
        clip: try the step that clips too, of 2 bits; False where something else clips later.

    Raises:
        ValueError: NaN or infinite values.
    """
    w = checked(weight, name, skip)
    groups = grouped(w, spec.group_size)
    grid = widest_grid(groups, spec)
    if spec.float4:
        grid = best_clip(groups, grid, (), lambda error: error.square_().sum(-1))
    elif spec.symmetric and spec.bits < 8:
        grid = best_step(groups, grid, clip=clip and spec.bits == 2)
    elif not spec.symmetric and not spec.float_zero:
        return packed(by_inverse(groups, grid).to(torch.int8).flatten(1)[:, : w.shape[1]], grid, spec.group_size)
    return on_grid(groups, grid, w.shape[1], spec.group_size)


def by_inverse(groups: Tensor, grid: Grid) -> Tensor:
    """Codes of an asymmetric grid as torchao's ``quantize_affine`` has them in float32, to the bit."""
    assert grid.zero is not None, "a symmetric grid's are by division"
    return torch.round(groups * (1 / grid.scale.to(groups))).add_(grid.zero.to(groups)).clamp_(*levels(grid.bits))


def best_step(groups: Tensor, grid: Grid, clip: bool) -> Grid:
    """``grid``, of the first step, with the best of the three for each group of [N, G, g]; of the four with ``clip``."""
    parts = [_best(block, Grid(scale, grid.bits), clip) for block, scale in zip(*row_blocks(groups, grid.scale), strict=True)]
    return grid.shrunk(torch.cat(parts)) if parts else grid


def _best(w: Tensor, grid: Grid, clip: bool) -> Tensor:
    lowest, highest = levels(grid.bits)
    unit = w / grid.scale.to(w)
    last = torch.maximum(divided(unit.amax(-1, keepdim=True), highest), divided(unit.amin(-1, keepdim=True), lowest))
    best = (torch.round(unit).clamp_(lowest, highest) - unit).square_().sum(-1, keepdim=True)
    factor = torch.ones_like(best)
    factors = [
        torch.full_like(best, 2 * highest / (highest - lowest) * NO_TIE),
        torch.where((last > 0) & (last < SHORTER), last, 1),
    ]
    if clip:
        factors.append(torch.full_like(best, highest / -lowest))
    for p in factors:
        error = (torch.round(unit / p).clamp_(lowest, highest).mul_(p) - unit).square_().sum(-1, keepdim=True)
        factor, best = torch.where(error < best, p, factor), torch.minimum(error, best)
    return factor
