"""The ends of a grid whose zero lies between the codes, each with a clip of its own.

    argmin over a, b of  loss(Q(w; s_ab, z_ab) - w)        low = m + a (min(w) - m)        high = m + b (max(w) - m)

    s_ab, z_ab   the grid whose first code is low and whose last one is high (grid.py)        m: the mean of the group
    a, b         every second one of the parts that the caller gives, then their neighbours around the best

Shapes:  w [N, G, g]    s, z [N, G, 1]
Why:     where zero has to be a code, one end's clip moves the other.  Weights of a group have a longer tail on one side or on the
         other, and with few codes it matters which one is cut.
Cost:    57 of the 196 pairs of 14 parts are tried (docs/adr/0047-zero-between-the-codes.md: what the other ones would gain).
Source:  the zero point as a number is HQQ's (Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"),
         which finds it by a solver for a norm below 1 and leaves the step as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmqc.solvers.clip import row_blocks
from mmqc.solvers.grid import Grid
from mmqc.solvers.quantized import levels, positive


def best_ends(groups: Tensor, widest: Grid, parts: Sequence[float], loss: Callable[[Tensor], Tensor]) -> Grid:
    """The best grid of each group, of those above; of equal ones the first.

    Args:
        groups: [N, G, g] in floating point.
        widest: the grid of each that reaches both ends, its zero between the codes.
        parts: falling from 1 in equal steps.
        loss: of errors [n, G, g] in units of the widest grid's step, to [n, G]; may use them up.
    """
    blocks, scales = row_blocks(groups, widest.scale)
    found = [_best(w / scale.to(w), widest.bits, parts, loss) for w, scale in zip(blocks, scales, strict=True)]
    if not found:
        return widest
    scale, zero = (torch.cat(part) for part in zip(*found, strict=True))
    return replace(widest, scale=positive(widest.scale * scale), zero=zero)


def _best(unit: Tensor, bits: int, parts: Sequence[float], loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(Steps in units of the widest one, zero points) of one block of rows."""
    mean = unit.mean(-1, keepdim=True)
    below, above = unit.amin(-1, keepdim=True) - mean, unit.amax(-1, keepdim=True) - mean
    least, a, b = torch.full_like(mean, torch.inf), torch.ones_like(mean), torch.ones_like(mean)

    def attempt(low: Tensor, high: Tensor) -> None:
        nonlocal least, a, b
        error = loss(_errors(unit, Grid.between(mean + low * below, mean + high * above, bits)))[..., None]
        better = error < least
        least, a, b = (torch.where(better, *pair) for pair in ((error, least), (low, a), (high, b)))

    one, step = torch.ones_like(mean), parts[0] - parts[1]
    for low in parts[::2]:
        for high in parts[::2]:
            attempt(one * low, one * high)
    coarse = a, b
    for first in (0, -step, step):
        for second in (0, -step, step):
            if first or second:
                attempt(*((part + moved).clamp(max=1) for part, moved in zip(coarse, (first, second), strict=True)))
    best = Grid.between(mean + a * below, mean + b * above, bits)
    assert best.zero is not None
    return best.scale, best.zero


def _errors(unit: Tensor, grid: Grid) -> Tensor:
    """What a grid leaves of ``unit``, in its units: codes as they would be but for roundings of 2^-24 of them."""
    assert grid.zero is not None
    scale, zero = grid.scale.to(unit), grid.zero.to(unit)
    place = torch.addcmul(zero, unit, 1 / scale)
    return torch.round(place).clamp_(*levels(grid.bits)).sub_(place).mul_(scale)
