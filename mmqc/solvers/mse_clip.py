"""Round to nearest with the clip that loses least: every row tries smaller and smaller largest magnitudes.

    s = argmin over p of  sum_k |w_k - s_p round(w_k / s_p)|^2.4
    s_p = p max|w| / (2^(b-1) - 1)        p = 1, 0.99, ..., 0.21

Shapes:  w [N, K]    s [N]    q int8 [N, K]
Source:  QuaRot's weight quantizer, which MQuant uses unchanged: norm 2.4, grid 100, maxshrink 0.8 (80 steps).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import WeightSpec
from .quantized import Quantized, checked, positive, rounded
from .rtn import absmax_scale

NORM = 2.4
GRID = 100
MAX_SHRINK = 0.8
# rows are searched in blocks of about this many elements, so that the 80 passes stay in the cache
BLOCK = 1 << 17
LARGE_BLOCK = 1 << 24  # an accelerator: launches cost more than cache misses


def clip_scale(w: Tensor, bits: int, norm: float = NORM, grid: int = GRID, max_shrink: float = MAX_SHRINK) -> Tensor:
    """The float32 scale [N] of the rows of w [N, K] that minimises the ``norm``-th power of the rounding error.

    Of equal errors the least clipped wins, so a row that is already on the grid keeps its scale.
    """
    rows = max(1, (BLOCK if w.device.type == "cpu" else LARGE_BLOCK) // max(1, w.shape[1]))
    return torch.cat([_clip_rows(block, bits, norm, grid, max_shrink) for block in w.split(rows)])


def _clip_rows(w: Tensor, bits: int, norm: float, grid: int, max_shrink: float) -> Tensor:
    widest = absmax_scale(w, bits)
    # dividing by the row's scale first makes the powers independent of the row's magnitude: no under- or overflow
    unit = w / widest.to(w.dtype)[:, None]
    best = torch.full_like(unit[:, 0], torch.inf)
    shrink = torch.ones_like(best)
    for step in range(int(max_shrink * grid)):
        p = 1 - step / grid
        candidate = torch.full_like(best, p)
        error = (rounded(unit, candidate[:, None], bits).mul_(p) - unit).abs_().pow_(norm).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        shrink = torch.where(better, candidate, shrink)
    return positive(widest * shrink)


def solve(
    weight: Tensor, spec: WeightSpec, hessian: Tensor | None = None, *, skip: Tensor | None = None, name: str = "weight"
) -> Quantized:
    """Quantizes ``weight`` [N, K] per output channel with the clip that minimises the error's 2.4-norm.

    Args:
        weight: floating point [N, K].
        spec: bits are read; one scale per output channel.
        hessian: not used; every solver takes the same arguments.
        skip: int64 indices of input channels that something else computes; their codes are 0.
        name: FQN for error messages.

    Raises:
        ValueError: NaN or infinite values, or a per-group spec.
    """
    if spec.group_size:
        raise ValueError(f"{name}: the mse_clip solver has one scale per output channel; use PerRow(), or solver 'rtn'")
    w = checked(weight, name)
    if skip is not None:
        w = w.index_fill(1, skip.to(w.device), 0)
    scale = clip_scale(w, spec.bits)
    return Quantized(rounded(w, scale[:, None], spec.bits).to(torch.int8), scale)
