"""GPTQ: round one input channel after the other, and let the later ones make up for each rounding error.

    minimise  tr (W - Q) H (W - Q)ᵀ        H = Xᵀ X, the second moment of the layer's inputs

    U upper triangular, UᵀU = (H + λ I)⁻¹.  For i = 0 ... K-1:
        e = (w_i - q_i) / U_ii        w_j <- w_j - e U_ij   for all j > i

Shapes:  W [N, K]    H [K, K]    s [N] or [N, ceil(K/g)]    q int8 [N, K]
Groups:  static, their grids from the untouched weight before the sweep, so that channels may be taken in any order; or
         dynamic, from what a group has become when its turn comes, in the order of the channels.
Clips:   of a row's or group's grid, steps p s of the widest one, p = 1, 0.99, ..., 0.21:
         best       a sweep for each of ``CANDIDATES``: ``inputs``, and p = 1, 0.9, ..., 0.5 for all groups.  Each row keeps the
                    sweep that loses least, sum_i e_i² = (w - q)(H + λ I)(w - q)ᵀ, then descends from there (descent.py)
         inputs     argmin over p of  sum_i |w_i - q_i|^2.4 / U_ii²: e_i² is what the sweep pays for a rounding
         weights    argmin over p of  sum_i |w_i - q_i|^2.4, whatever the inputs (mse_clip.py)
         none       p = 1
Memory:  ``best`` keeps H once more, in the dtype of the sweep.
Source:  Frantar et al., arXiv:2210.17323, with QuaRot's settings, which are MQuant's (arXiv:2502.00425, Algorithm 1):
         blocks of 128, λ = 1 % of H's mean diagonal, channels in order of falling diagonal (act_order).  They clip by the
         weights, which behind AWQ's factors are large just where they count; no single clip is good for all weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.config import Clip, WeightSpec
from mmqc.solvers import mse_clip
from mmqc.solvers.clip import best_clip
from mmqc.solvers.descent import descend
from mmqc.solvers.factor import inverse_factor_
from mmqc.solvers.grid import Grid, grouped, packed
from mmqc.solvers.quantized import Quantized, checked
from mmqc.solvers.second_moment import checked_hessian

BLOCK = 128
CANDIDATES: tuple[Clip | float, ...] = ("inputs", 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
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
        grid = Grid.of(grouped(w, spec.group_size), spec.bits, spec.symmetric)
        codes = _zeros(grid, w, spec.group_size)
    else:
        _decouple_(h, out)
        first = h.diagonal() if spec.act_order else torch.zeros_like(h[0])
        order = torch.argsort(first, descending=True, stable=True)
        kept = h.to(w.dtype, copy=True) if spec.how_to_clip == "best" else None
        u, cost, more = factored_(h, order, spec.damping, name)
        notes += more
        codes, grid = _best(w, spec, order, u, cost.to(w.dtype), block)
        if kept is not None:
            codes, grid = descend(w, kept, codes, grid, spec.group_size, ROUNDS)
        codes = torch.where(out, _zeros(grid, w, spec.group_size), codes)
    return packed(codes, grid, spec.group_size, "; ".join(notes))


def _best(w: Tensor, spec: WeightSpec, order: Tensor, u: Tensor, cost: Tensor, block: int) -> tuple[Tensor, Grid]:
    """Codes int8 [N, K] and grids: of each row those of the sweep that loses least, the first one of equals."""
    codes, grid, least = torch.empty_like(w, dtype=torch.int8), None, w.new_full((len(w),), torch.inf)
    for clip in CANDIDATES if spec.how_to_clip == "best" else (spec.how_to_clip,):
        sweep = _Sweep(w, spec, clip)
        sweep.fit(cost)
        found, loss = sweep.run(w.T[order].contiguous(), order, u, block)
        better = loss < least if grid is not None else torch.ones_like(loss, dtype=torch.bool)
        codes[better] = codes[better].index_copy(1, order, found.T[better])
        grid = sweep.grid if grid is None else sweep.grid.where(better, grid)
        least = torch.minimum(least, loss)
    assert grid is not None
    return codes, grid


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


def clipped(groups: Tensor, cost: Tensor, clip: Clip | float, bits: int, symmetric: bool = True) -> Grid:
    """The grid of each group of [N, G, g] whose channels cost [G, g]; a number: that part of the widest one."""
    if clip == "weights":
        return mse_clip.clipped(groups, bits, symmetric)
    widest = Grid.of(groups, bits, symmetric)
    if isinstance(clip, float):
        return widest.shrunk(torch.full_like(widest.scale, clip))
    if clip == "none":
        return widest
    return best_clip(groups, widest, mse_clip.SHRINKS, lambda e: e.abs_().pow_(mse_clip.NORM).mul_(cost).sum(-1))


class _Sweep:
    """The sweep over the channels of w [N, K], and the grids that it used: [N, G, 1]."""

    grid: Grid

    def __init__(self, w: Tensor, spec: WeightSpec, clip: Clip | float) -> None:
        self.w, self.spec, self.size = w, spec, spec.group_size
        self.clip: Clip | float = clip
        self.dynamic = bool(spec.group_size) and not spec.static_groups

    def fit(self, cost: Tensor) -> None:
        """Find the grids of the untouched weight; an error of channel i costs ``cost`` [K] times its square."""
        self.cost = grouped(cost[None], self.size)[0]
        self.grid = self.find(grouped(self.w, self.size), self.cost)

    def find(self, groups: Tensor, cost: Tensor) -> Grid:
        """The grids of groups [N, G, g] whose channels cost [G, g]."""
        return clipped(groups, cost, self.clip, self.spec.bits, self.spec.symmetric)

    def run(self, w_KN: Tensor, order: Tensor, u: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The codes int8 [K, N], and what they lose [N]; ``w_KN`` is used up.  Transposed: a channel is one contiguous row."""
        codes, loss = torch.empty_like(w_KN, dtype=torch.int8), torch.zeros_like(w_KN[0])
        groups = order // self.size if self.size else torch.zeros_like(order)
        block = self.size if self.dynamic else block  # all errors in front of a group must have reached it whole
        for start in range(0, len(w_KN), block):
            stop = min(start + block, len(w_KN))
            if self.dynamic:
                self.refit(start // self.size, w_KN[start:stop])
            rows = u[start:stop].to(w_KN.dtype)  # in float32 the whole of U would be half as large as H again
            scale, zero = self.of(groups[start:stop], w_KN.dtype)
            codes[start:stop], errors = torch.ops.mmqc.gptq_block(
                w_KN[start:stop], rows[:, start:stop], scale, zero, self.grid.bits
            )
            w_KN[stop:].addmm_(rows[:, stop:].T, errors, alpha=-1)
            loss += errors.square().sum(0)
        return codes, loss

    def of(self, groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points [B, N] of B channels."""
        scale, zero = (None if t is None else t[:, groups, 0].T.to(dtype) for t in (self.grid.scale, self.grid.zero))
        assert scale is not None
        return scale, zero

    def refit(self, group: int, w_gN: Tensor) -> None:
        """Fit a group's grids to what it has become."""
        found = self.find(w_gN.T[:, None], self.cost[group, None, : len(w_gN)])
        self.grid.scale[:, group] = found.scale[:, 0]
        if self.grid.zero is not None and found.zero is not None:
            self.grid.zero[:, group] = found.zero[:, 0]
