"""GPTQ: round one input channel after the other, and let the later ones make up for each rounding error.

    minimise  tr (W - Q) H (W - Q)ᵀ        H = Xᵀ X, the second moment of the layer's inputs

    U upper triangular, UᵀU = (H + λ I)⁻¹.  For i = 0 ... K-1:
        e = (w_i - q_i) / U_ii        w_j <- w_j - e U_ij   for all j > i

Shapes:  W [N, K]    H [K, K]    s [N] or [N, ceil(K/g)]    q int8 [N, K]
Groups:  static, their grids from the untouched weight before the sweep, so that channels may be taken in any order; or
         dynamic, from what a group has become when its turn comes, in the order of the channels.
Source:  Frantar et al., arXiv:2210.17323, with QuaRot's settings, which are MQuant's (arXiv:2502.00425, Algorithm 1):
         blocks of 128, λ = 1 % of H's mean diagonal, channels in order of falling diagonal (act_order),
         scales by the mse clip of the untouched weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..config import WeightSpec
from .grid import Grid, grouped, packed
from .mse_clip import clipped
from .quantized import Quantized, checked
from .second_moment import checked_hessian

BLOCK = 128
# a positive semidefinite H needs none of the larger ones; with all of them used up, H is not a second moment
MORE_DAMPING = (1, 10, 100, 1000)


def solve(
    weight: Tensor,
    spec: WeightSpec,
    hessian: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    name: str = "weight",
    clip: bool = True,
    block: int = BLOCK,
) -> Quantized:
    """Quantizes ``weight`` [N, K] against the inputs' second moment.

    The sweep runs in float64 if the weight is float64, otherwise in float32; the factorization always in float64.

    Args:
        weight: floating point [N, K].
        spec: bits, granularity, symmetry, ``act_order``, ``static_groups`` and ``damping`` are read.
        hessian: XᵀX [K, K] of the layer's inputs, up to any positive factor.
        skip: int64 indices of input channels that something else computes: zero before solving, values 0, and taken
            out of H, so that the other channels are solved as if these did not exist.
        name: FQN for error messages.
        clip: scales by the mse clip; False means absmax.
        block: channels between two updates of the rest; changes speed only.

    Raises:
        ValueError: no hessian, one of another shape, not finite or not positive semidefinite; NaN or infinite weights.
    """
    w = checked(weight, name)
    h = checked_hessian(hessian, w, name, "gptq")
    out, notes = _unused(h, skip)
    # an input that is always zero says nothing about its weights: zero is the value that costs nothing (QuaRot)
    w = w.masked_fill(out, 0)
    sweep = _Sweep(w, spec, partial(clipped if clip else Grid.of, bits=spec.bits, symmetric=spec.symmetric))
    codes = torch.empty_like(w, dtype=torch.int8)
    if not out.all():
        h = _without(h, out)
        order = torch.argsort(h.diagonal(), descending=True, stable=True) if spec.act_order else _as_they_are(h)
        u, used = _factor(h[order][:, order], spec.damping, name)
        if used != spec.damping:
            notes += [f"damping {used:g} of the mean diagonal, not {spec.damping:g}: the inputs are nearly dependent"]
        codes[:, order] = sweep.run(w.T[order].contiguous(), order, u.to(w.dtype), block).T
    codes = torch.where(out, _zeros(sweep.grid, w, spec.group_size), codes)
    return packed(codes, sweep.grid, spec.group_size, "; ".join(notes))


def _unused(h: Tensor, skip: Tensor | None) -> tuple[Tensor, list[str]]:
    """Input channels [K] to leave out, and what there is to say about them."""
    skipped = torch.zeros(len(h), dtype=torch.bool, device=h.device)
    if skip is not None:
        skipped[skip.to(h.device)] = True
    dead = (h.diagonal() <= 0) & ~skipped
    return skipped | dead, [f"{int(dead.sum())} input channels are always zero"] if dead.any() else []


def _as_they_are(h: Tensor) -> Tensor:
    return torch.arange(len(h), device=h.device)


def _zeros(grid: Grid, w: Tensor, group_size: int) -> Tensor:
    """The codes int8 [N, K] of an all-zero weight."""
    return grid.codes(torch.zeros_like(grouped(w, group_size))).to(torch.int8).flatten(1)[:, : w.shape[1]]


def _without(h: Tensor, out: Tensor) -> Tensor:
    """H with the channels ``out`` decoupled from the rest, at the mean diagonal of the rest."""
    h = h.masked_fill(out[:, None] | out[None, :], 0)
    mean = h.diagonal().sum() / (~out).sum()
    h.diagonal().masked_fill_(out, mean)
    return h


def _factor(h: Tensor, damping: float, name: str) -> tuple[Tensor, float]:
    """The upper triangular U with UᵀU = (H + λI)⁻¹, and the damping that it took."""
    mean = h.diagonal().mean()
    eye = torch.eye(len(h), dtype=h.dtype, device=h.device)
    for factor in MORE_DAMPING:
        damped = h + damping * factor * mean * eye
        # Factoring from the last channel backwards, H = R Rᵀ with R upper, gives U = R⁻¹ without ever forming H⁻¹.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            return torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True), damping * factor
    raise ValueError(
        f"{name}: the second moment of its inputs is not positive semidefinite even with "
        f"{damping * MORE_DAMPING[-1]:g} of its mean diagonal added; it cannot come from XᵀX, check how it was summed"
    )


class _Sweep:
    """The sweep over the channels of w [N, K], and the grids that it used: [N, G, 1]."""

    def __init__(self, w: Tensor, spec: WeightSpec, find: Callable[[Tensor], Grid]) -> None:
        self.size, self.find = spec.group_size, find
        self.dynamic = bool(spec.group_size) and not spec.static_groups
        self.grid = find(grouped(w, spec.group_size))

    def run(self, w_KN: Tensor, order: Tensor, u: Tensor, block: int) -> Tensor:
        """The codes int8 [K, N]; ``w_KN`` is used up.  Transposed, so that a channel is one contiguous row."""
        codes = torch.empty_like(w_KN, dtype=torch.int8)
        numbers = (order // self.size if self.size else torch.zeros_like(order)).tolist()
        if self.dynamic:  # a group must not begin before all errors in front of it have reached it whole
            block = self.size * max(1, block // self.size)
        for start in range(0, len(w_KN), block):
            stop = min(start + block, len(w_KN))
            errors = torch.empty_like(w_KN[start:stop])
            for i in range(start, stop):
                if self.dynamic and i % self.size == 0:
                    self.refit(numbers[i], w_KN[i : i + self.size])
                grid = self.of(numbers[i])
                q = grid.codes(w_KN[i])
                codes[i] = q.to(torch.int8)
                errors[i - start] = (w_KN[i] - grid.values(q)) / u[i, i]
                w_KN[i + 1 : stop].addr_(u[i, i + 1 : stop], errors[i - start], alpha=-1)
            w_KN[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1)
        return codes

    def of(self, group: int) -> Grid:
        """The grids [N] of one group."""
        zero = None if self.grid.zero is None else self.grid.zero[:, group, 0]
        return Grid(self.grid.scale[:, group, 0], self.grid.bits, zero)

    def refit(self, group: int, w_gN: Tensor) -> None:
        """Fit a group's grids to what it has become."""
        found = self.find(w_gN.T[:, None])
        self.grid.scale[:, group] = found.scale[:, 0]
        if self.grid.zero is not None and found.zero is not None:
            self.grid.zero[:, group] = found.zero[:, 0]
