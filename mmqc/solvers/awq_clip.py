"""AWQ's clip: round to nearest with the clip that loses least in the layer's output.

    p* = argmin over p of  E |x_g · (ŵ_g(p) - w_g)|²  =  (ŵ_g(p) - w_g) H_gg (ŵ_g(p) - w_g)ᵀ        H = Xᵀ X
    p  = 1, 0.95, ..., 0.55        for each output channel and group g by itself; where zero lies between the codes, for each end

Shapes:  w [N, K]    H [K, K], of which only the blocks H_gg [g, g] are read    q int8 [N, K]
Source:  Lin et al., arXiv:2306.00978, as in their code: grid 20, maximal shrink 0.5 (10 steps).  The second moment gives the
         expectation over all tokens that were seen, where theirs samples 512.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.solvers.both_ends import best_ends
from mmqc.solvers.clip import best_clip
from mmqc.solvers.grid import grouped, on_grid
from mmqc.solvers.quantized import Quantized, checked
from mmqc.solvers.second_moment import checked_hessian
from mmqc.solvers.widest import widest_grid

SHRINKS = tuple(1 - step / 20 for step in range(10))


def solve(
    weight: Tensor, spec: WeightSpec, hessian: Tensor | None = None, *, skip: Tensor | None = None, name: str = "weight"
) -> Quantized:
    """Quantizes ``weight`` with the clip, per output channel or group, that minimises its part of the output's error.

    Args:
        weight: floating point [N, K].
        spec: bits, granularity and symmetry are read; a last group may be short.
        hessian: XᵀX [K, K] of the layer's inputs, up to any positive factor.
        skip: int64 indices of input channels that something else computes; their values are 0.
        name: FQN for error messages.

    Raises:
        ValueError: no hessian, one of another shape or not finite; NaN or infinite weights.
    """
    w = checked(weight, name, skip)
    h = checked_hessian(hessian, w, name, "awq_clip")
    mean = h.diagonal().mean().clamp(min=torch.finfo(h.dtype).tiny)
    blocks = (diagonal_blocks(h, spec.group_size) / mean).to(w.dtype)
    groups = grouped(w, spec.group_size)

    def loss(error: Tensor) -> Tensor:
        by_group = error.transpose(0, 1)
        return (by_group @ blocks).mul_(by_group).sum(-1).T

    grid = (best_ends if spec.float_zero else best_clip)(groups, widest_grid(groups, spec), SHRINKS, loss)
    return on_grid(groups, grid, w.shape[1], spec.group_size)


def diagonal_blocks(h: Tensor, group_size: int) -> Tensor:
    """H [K, K] -> its blocks H_gg [G, g, g], the last filled up with zeros; [1, K, K] for g = 0."""
    if not group_size:
        return h[None]
    padding = -len(h) % group_size
    wide = torch.nn.functional.pad(h, (0, padding, 0, padding)) if padding else h  # padding copies all of H
    wide = wide.unflatten(0, (-1, group_size)).unflatten(2, (-1, group_size))  # [G, g, G, g]
    return wide.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
