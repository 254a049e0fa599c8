"""The search for a clip: every row, or group, tries smaller and smaller steps and keeps the one that loses least.

    p* = argmin over p of  loss(p s clamp(round(w / (p s))) - w)

Shapes:  w [N, G, g]    s, p [N, G, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmqc.solvers.grid import Grid

# rows are searched in blocks of about this many elements, so that the passes stay in the cache
BLOCK = 1 << 17
LARGE_BLOCK = 1 << 24  # an accelerator: launches cost more than cache misses


def best_clip(w: Tensor, grid: Grid, shrinks: Iterable[float], loss: Callable[[Tensor], Tensor]) -> Grid:
    """``grid`` with the best of the ``shrinks`` for each group of w [N, G, g].

    Of equal losses the first wins, so with 1 in front a group that is already on the grid keeps its scale.

    Args:
        w: weights in groups.
        grid: the widest grid of each.
        shrinks: candidates, falling from 1; a grid of floats of 4 bits has its own.
        loss: of errors [n, G, g] in units of the grid's step, to [n, G].  Units make powers of the error independent of
            the weights' magnitude: no under- or overflow.
    """
    shrinks = grid.shrinks(shrinks)
    blocks, scales = row_blocks(w, grid.scale)
    zeros = [None] * len(blocks) if grid.zero is None else row_blocks(w, grid.zero)[1]
    parts = zip(blocks, scales, zeros, strict=True)
    factors = [_search(block, replace(grid, scale=s, zero=z), shrinks, loss) for block, s, z in parts]
    return grid.shrunk(torch.cat(factors)) if factors else grid


def row_blocks(w: Tensor, beside: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """W [N, G, g] and what goes with its rows, in blocks of rows that stay in the cache; none for N = 0."""
    size = BLOCK if w.device.type == "cpu" else LARGE_BLOCK
    rows = max(1, size // max(1, w[0].numel())) if len(w) else 1
    return (w.split(rows), beside.split(rows)) if len(w) else ((), ())


def _search(w: Tensor, grid: Grid, shrinks: Sequence[float], loss: Callable[[Tensor], Tensor]) -> Tensor:
    unit = w / grid.scale.to(w)
    best = torch.full_like(unit[..., 0], torch.inf)
    shrink = torch.ones_like(best)
    for p in shrinks:
        error = loss(grid.clipped(unit, p).sub_(unit))
        better = error < best
        best = torch.where(better, error, best)
        shrink = torch.where(better, p, shrink)
    return shrink[..., None]
