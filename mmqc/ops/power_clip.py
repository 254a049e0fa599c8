"""The clip of every group's grid, of several, that loses least in a power of the rounding error.

    p* = argmin over p of  sum_k c_k |p clamp(round(u_k / p), low - z, high - z) - u_k|^n        u = w / s

Shapes:  w [N, G, g]    s, z [N, G, 1], z None for 0    c [G, g], None for 1    p* [N, G, 1] in w's dtype
Why:     errors in units of the step: powers of them neither under- nor overflow.
Order:   of equal losses the first wins: with 1 in front a group that is on its grid already keeps its scale.
Source:  QuaRot's weight quantizer (arXiv:2404.00456), which has n = 2.4 and no costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.ops.define import define


def check(w: Tensor, scale: Tensor, zero: Tensor | None, cost: Tensor | None, shrinks: Sequence[float], bits: int) -> None:
    """Raise unless shapes and numbers fit."""
    one = (*w.shape[:-1], 1)
    if w.dim() != 3 or scale.shape != one or (zero is not None and zero.shape != one):
        raise ValueError(f"power_clip: w is [N, G, g], s and z [N, G, 1]; got {list(w.shape)} and {list(scale.shape)}")
    if cost is not None and cost.shape != w.shape[1:]:
        raise ValueError(f"power_clip: costs are {list(w.shape[1:])}, one for each channel; got {list(cost.shape)}")
    if not shrinks or not 2 <= bits <= 8:
        raise ValueError(f"power_clip: {len(shrinks)} clips, bits = {bits}: 1 at least, and 2 to 8")


def reference(
    w: Tensor, scale: Tensor, zero: Tensor | None, cost: Tensor | None, shrinks: Sequence[float], power: float, bits: int
) -> Tensor:
    """The formula, clip by clip."""
    check(w, scale, zero, cost, shrinks, bits)
    ends = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = ends if zero is None else (end - zero.to(w) for end in ends)
    unit = w / scale.to(w)
    least = torch.full_like(unit[..., 0], torch.inf)
    best = torch.ones_like(least)
    for p in shrinks:
        error = torch.round(unit / p).clamp_(low, high).mul_(p).sub_(unit).abs_().pow_(power)
        loss = (error if cost is None else error.mul_(cost)).sum(-1)
        best, least = torch.where(loss < least, p, best), torch.where(loss < least, loss, least)
    return best[..., None]


def fake(
    w: Tensor, scale: Tensor, zero: Tensor | None, cost: Tensor | None, shrinks: Sequence[float], power: float, bits: int
) -> Tensor:
    """One clip for each group."""
    check(w, scale, zero, cost, shrinks, bits)
    return torch.empty_like(w[..., :1], memory_format=torch.contiguous_format)


define(
    "power_clip(Tensor w, Tensor scale, Tensor? zero, Tensor? cost, float[] shrinks, float power, int bits) -> Tensor",
    reference,
    fake,
)
