"""Where zero lies on an asymmetric grid, chosen together with the clip.

    argmin over z, p of  sum_k c_k |w_k - Q(w_k; p s_z, z)|^2.4        z = z_0 - 1, z_0, z_0 + 1        p = 1, 0.99, ..., 0.21

    z_0, s_0    those of the widest grid (grid.py)
    s_z         the least step with which codes around z reach both ends,  max(max(w, 0) / (q_max - z), max(-w, 0) / (z - q_min))

Shapes:  w [N, G, g]    c [G, g]    s, z [N, G, 1]
Why:     with 2 bits zero is one of four codes, and which side has the longer end is a rounding of min(w) / s_0; a clip moves it no
         more.  The neighbour is kept only where it loses less.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.solvers.clip import row_blocks
from mmqc.solvers.grid import Grid
from mmqc.solvers.mse_clip import NORM, SHRINKS
from mmqc.solvers.quantized import levels, positive


def best_zero(groups: Tensor, widest: Grid, cost: Tensor) -> Grid:
    """The best grid of each group, of those above.

    Args:
        groups: [N, G, g] in floating point.
        widest: an asymmetric grid of each.
        cost: [G, g], positive.
    """
    blocks, scales = row_blocks(groups, widest.scale)
    assert widest.zero is not None, "a symmetric grid has its zero in the middle"
    zeros = row_blocks(groups, widest.zero)[1]
    found = [_best(w, replace(widest, scale=s, zero=z), cost) for w, s, z in zip(blocks, scales, zeros, strict=True)]
    scale, zero = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else (widest.scale, widest.zero)
    return replace(widest, scale=scale, zero=zero)


def _best(w: Tensor, widest: Grid, cost: Tensor) -> tuple[Tensor, Tensor]:
    """(Steps, zero points) of one block of rows."""
    tried = []
    for grid in (widest, _around(w, widest, -1), _around(w, widest, 1)):
        factor = torch.ops.mmqc.power_clip(w, grid.scale, grid.zero, cost, SHRINKS, NORM, grid.bits)
        grid = grid.shrunk(factor)
        error = (grid.values(grid.codes(w)) - w).div_(widest.scale.to(w)).abs_().pow_(NORM)  # in one unit for all zeros
        tried.append((error.mul_(cost).sum(-1, keepdim=True), grid.scale, grid.zero))
    least, scale, zero = tried[0]
    for loss, s, z in tried[1:]:
        better = loss < least
        least, scale, zero = (torch.where(better, *pair) for pair in ((loss, least), (s, scale), (z, zero)))
    return scale, zero


def _around(w: Tensor, widest: Grid, moved: int) -> Grid:
    """The widest grid whose zero lies ``moved`` codes further; the same one at the end of the codes."""
    assert widest.zero is not None
    low, high = levels(widest.bits)
    zero = (widest.zero + moved).clamp(low, high)
    above, below = w.amax(-1, keepdim=True).clamp(min=0), (-w.amin(-1, keepdim=True)).clamp(min=0)
    up, down = high - zero.to(w), zero.to(w) - low
    reach = torch.maximum(torch.where(up > 0, above / up, 0), torch.where(down > 0, below / down, 0))
    return replace(widest, scale=positive(reach.float()), zero=zero)
