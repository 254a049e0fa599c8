"""GPTQ: round one input channel after the other, and let the later ones make up for each rounding error.

    minimise  tr (W - Q) H (W - Q)ᵀ        H = Xᵀ X, the second moment of the layer's inputs

    U upper triangular, UᵀU = (H + λ I)⁻¹.  For i = 0 ... K-1:
        e = (w_i - q_i) / U_ii        w_j <- w_j - e U_ij   for all j > i

Shapes:  W [N, K]    H [K, K]    s [N] or [N, ceil(K/g)]    q int8 [N, K]
Groups:  static, their grids from the untouched weight before the sweep, so that channels may be taken in any order; or
         dynamic, from what a group has become when its turn comes, in the order of the channels.
Clips:   of a row's or group's grid, steps p s of the widest one, p = 1, 0.99, ..., 0.21:
         best       a sweep for each of ``CANDIDATES``: ``inputs``, and p = 1, 0.9, ..., 0.5 for all groups; for floats of 4 bits
                    ``inputs``, ``weights`` and p = 1.  Each row keeps the sweep that loses least, sum_i e_i² =
                    (w - q)(H + λ I)(w - q)ᵀ, then descends from there (descent.py)
         inputs     argmin over p of  sum_i |w_i - q_i|^2.4 / U_ii²: e_i² is what the sweep pays for a rounding; on asymmetric
                    grids over the zero point as well (zero_point.py, or both_ends.py)
         weights    argmin over p of  sum_i |w_i - q_i|^2.4, whatever the inputs (mse_clip.py)
         none       p = 1
Memory:  ``best`` keeps H once more, in the dtype of the sweep; its sweeps go side by side (sweep.py).
Source:  Frantar et al., arXiv:2210.17323, with QuaRot's settings, which are MQuant's (arXiv:2502.00425, Algorithm 1):
         blocks of 128, λ = 1 % of H's mean diagonal, channels in order of falling diagonal (act_order).  They clip by the
         weights, which behind AWQ's factors are large just where they count; no single clip is good for all weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.config import Clip, WeightSpec
from mmqc.solvers.descent import descend
from mmqc.solvers.factor import inverse_factor_
from mmqc.solvers.grid import Grid, grouped, packed
from mmqc.solvers.quantized import Quantized, checked
from mmqc.solvers.second_moment import checked_hessian
from mmqc.solvers.sweep import sweep
from mmqc.solvers.widest import widest_grid

BLOCK = 128
CANDIDATES: tuple[Clip | float, ...] = ("inputs", 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
FLOAT4_CANDIDATES: tuple[Clip | float, ...] = ("inputs", "weights", 1.0)
ROUNDS = 2


def solve(
    weight: Tensor,
    spec: WeightSpec,
    hessian: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    name: str = "weight",
    block: int = BLOCK,
    overwrite: bool = False,
) -> Quantized:
    """Quantizes ``weight`` [N, K] against the inputs' second moment.

    The sweep runs in float64 if the weight is float64, otherwise in float32; the factorization always in float64.

    Args:
        weight: floating point [N, K].
        spec: bits, granularity, symmetry, ``act_order``, ``static_groups``, ``damping`` and ``clip`` are read.
        hessian: XᵀX [K, K] of the layer's inputs, up to any positive factor.
        skip: int64 indices of input channels that something else computes: zero before solving, values 0, and taken
            out of H, so that the other channels are solved as if these did not exist.
        name: FQN for error messages.
        block: channels between two updates of the rest; changes speed only.
        overwrite: a float64 ``hessian`` on the weight's device may be used up: 2.9 GB less for 18,944 channels.

    Raises:
        ValueError: no hessian, one of another shape, not finite or not positive semidefinite; NaN or infinite weights.
    """
    w = checked(weight, name)
    h = checked_hessian(hessian, w, name, "gptq")
    h = h if overwrite or hessian is None or h.data_ptr() != hessian.data_ptr() else h.clone()
    out, notes = _unused(h, skip)
    # an input that is always zero says nothing about its weights: zero is the value that costs nothing (QuaRot)
    w = w.masked_fill(out, 0)
    if out.all():
        grid = widest_grid(grouped(w, spec.group_size), spec)
        codes = _zeros(grid, w, spec.group_size)
    else:
        _decouple_(h, out)
        first = h.diagonal() if spec.act_order else torch.zeros_like(h[0])
        order = torch.argsort(first, descending=True, stable=True)
        kept = h.to(w.dtype, copy=True) if spec.how_to_clip == "best" else None
        u, cost, more = factored_(h, order, spec.damping, name)
        notes += more
        several = FLOAT4_CANDIDATES if spec.float4 else CANDIDATES
        clips = several if spec.how_to_clip == "best" else (spec.how_to_clip,)
        codes, grid, _ = sweep(w, spec, clips, order, u, cost.to(w.dtype), block)
        if kept is not None:
            codes, grid = descend(w, kept, codes, grid, spec.group_size, ROUNDS)
        codes = torch.where(out, _zeros(grid, w, spec.group_size), codes)
    return packed(codes, grid, spec.group_size, "; ".join(notes))


def _unused(h: Tensor, skip: Tensor | None) -> tuple[Tensor, list[str]]:
    """Input channels [K] to leave out, and what there is to say about them."""
    skipped = torch.zeros(len(h), dtype=torch.bool, device=h.device)
    if skip is not None:
        skipped[skip.to(h.device)] = True
    dead = (h.diagonal() <= 0) & ~skipped
    return skipped | dead, [f"{int(dead.sum())} input channels are always zero"] if dead.any() else []


def _zeros(grid: Grid, w: Tensor, group_size: int) -> Tensor:
    """The codes int8 [N, K] of an all-zero weight."""
    return grid.codes(torch.zeros_like(grouped(w, group_size))).to(torch.int8).flatten(1)[:, : w.shape[1]]


def _decouple_(h: Tensor, out: Tensor) -> None:
    """Decouple the channels ``out`` from the rest, at the mean diagonal of the rest."""
    mean = h.diagonal().masked_fill(out, 0).sum() / (~out).sum()
    h[out] = 0
    h[:, out] = 0
    h.diagonal().masked_fill_(out, mean)


def factored_(h: Tensor, order: Tensor, damping: float, name: str) -> tuple[Tensor, Tensor, list[str]]:
    """(U; what the sweep pays for a channel's squared error, 1 / U_ii² [K] relative to the mean, in w's order; what to say).

    ``h`` is used up.
    """
    u, used = inverse_factor_(h, order, damping, name)
    cost = torch.empty_like(u[0])
    cost[order] = u.diagonal() ** -2
    dependent = f"damping {used:g} of the mean diagonal, not {damping:g}: the inputs are nearly dependent"
    return u, cost / cost.mean(), [dependent] if used != damping else []
