"""GPTQ's sweeps over one weight, one for each clip of its grids, side by side.

    for i = 0 ... K-1:   e = (w_i - q_i) / U_ii        w_j <- w_j - e U_ij   for all j > i        for every row of every sweep

Shapes:  W [N, K]    C clips    w, q [K, C, N] in the order of the sweep    s, z [G, C, N]    loss [C, N]
Why:     Channels wait for each other, rows do not: C sweeps of N rows take as many steps as one sweep of C N rows.
Order:   on an accelerator a block's errors reach the channels of its panel at once, those behind it with the whole panel's.
Memory:  w, q and what is picked of them: at most ``STACK`` bytes of w at a time, in parts of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.config import Clip, WeightSpec
from mmqc.solvers import mse_clip
from mmqc.solvers.float4_grid import Float4Grid
from mmqc.solvers.grid import Grid, grouped
from mmqc.solvers.widest import widest_grid
from mmqc.solvers.zero_point import best_zero

STACK = 1 << 30
PANELS = {"cpu": 0}  # channels between two updates of all the rest; accelerators' products of 128 are bound by their memory
PANEL = 512


def sweep(
    w: Tensor, spec: WeightSpec, clips: Sequence[Clip | float], order: Tensor, u: Tensor, cost: Tensor, block: int
) -> tuple[Tensor, Grid, Tensor]:
    """Codes int8 [N, K], grids [N, G, 1] and losses [N]: of each row those of the clip that loses least, the first one of equals.

    Args:
        w: float32 or float64 [N, K].
        spec: type, bits, symmetry, group size and ``static_groups`` are read.
        clips: one at least; see ``clipped``.
        order: int64 [K], the channel that comes first, second, ...
        u: float64 [K, K], upper triangular, in that order.
        cost: [K], what a channel's squared error costs, in w's order.
        block: channels between two updates of the rest.
    """
    rows = max(1, STACK // (len(clips) * max(1, w[0].numel()) * w.element_size())) if len(w) else 1
    parts = w.chunk(-(-len(w) // rows)) if len(w) else (w,)
    base = widest_grid(grouped(w, spec.group_size), spec)
    divisor = base.divisor if isinstance(base, Float4Grid) else None
    found = [Sweeps(part, spec, clips, order, cost, divisor).run(u, block).best() for part in parts]
    codes, scales, zeros, losses = zip(*found, strict=True)
    zero = None if base.zero is None else torch.cat(zeros).to(base.zero.dtype)
    return torch.cat(codes), replace(base, scale=torch.cat(scales), zero=zero), torch.cat(losses)


def clipped(groups: Tensor, cost: Tensor, clip: Clip | float, spec: WeightSpec, divisor: Tensor | None = None) -> Grid:
    """The grid of each group of [N, G, g] whose channels cost [G, g]; a number: that part of the widest one.

    ``divisor``: as of ``widest_grid``.
    """
    if clip == "weights" or (clip == "inputs" and (spec.symmetric or spec.float4 or spec.float_zero)):
        return mse_clip.clipped(groups, spec, cost if clip == "inputs" else None, divisor)
    widest = widest_grid(groups, spec, divisor)
    if clip == "inputs":
        return best_zero(groups, widest, cost)
    return widest.shrunk(torch.full_like(widest.scale, clip)) if isinstance(clip, float) else widest


class Sweeps:
    """See the top of the file.

    Attributes:
        codes: int8 [K, C, N], in the order of the sweep.
        loss: [C, N].
    """

    def __init__(
        self, w: Tensor, spec: WeightSpec, clips: Sequence[Clip | float], order: Tensor, cost: Tensor, divisor: Tensor | None = None
    ) -> None:
        self.divisor = divisor
        self.w, self.spec, self.clips, self.order, self.size = w, spec, clips, order, spec.group_size
        self.dynamic = bool(spec.group_size) and not spec.static_groups
        self.cost = grouped(cost[None], self.size)[0]
        fitted = [self.fit(grouped(w, self.size), self.cost, clip) for clip in clips]
        self.scale = torch.stack([grid.scale[..., 0].T for grid in fitted], 1).to(w.dtype)
        zeros = [grid.zero[..., 0].T for grid in fitted if grid.zero is not None]
        self.zero = torch.stack(zeros, 1).to(w.dtype) if zeros else None
        self.codes = torch.empty((w.shape[1], len(clips), len(w)), dtype=torch.int8, device=w.device)
        self.loss = w.new_zeros(len(clips), len(w))

    def fit(self, groups: Tensor, cost: Tensor, clip: Clip | float) -> Grid:
        """The grids of groups [N, G, g] whose channels cost [G, g]."""
        return clipped(groups, cost, clip, self.spec, self.divisor)

    def run(self, u: Tensor, block: int) -> Sweeps:
        """All channels.  Transposed: a channel is one contiguous row."""
        w = self.w.T[self.order][:, None].repeat(1, len(self.clips), 1)
        wide, codes, loss = w.flatten(1), self.codes.flatten(1), self.loss.view(-1)
        groups = self.order // self.size if self.size else torch.zeros_like(self.order)
        block = self.size if self.dynamic else block  # all errors in front of a group must have reached it whole
        panel = block * max(1, PANELS.get(w.device.type, PANEL) // block)
        for first in range(0, len(w), panel):
            last, errors = min(first + panel, len(w)), []
            rows = u[first:last, first:].to(w.dtype)  # in float32 the whole of U would be half as large as H again
            for start in range(first, last, block):
                stop = min(start + block, last)
                if self.dynamic:
                    self.refit(start // self.size, w[start:stop])
                scale, zero = (None if part is None else self.of(part, groups[start:stop]) for part in (self.scale, self.zero))
                own = rows[start - first : stop - first, start - first : last - first]
                codes[start:stop], found = torch.ops.mmqc.gptq_block(
                    wide[start:stop], own[:, : stop - start], scale, zero, self.spec.bits, self.spec.float4
                )
                wide[stop:last].addmm_(own[:, stop - start :].T, found, alpha=-1)
                errors.append(found)
            lost = errors[0] if len(errors) == 1 else torch.cat(errors)
            wide[last:].addmm_(rows[:, last - first :].T, lost, alpha=-1)
            loss += lost.square().sum(0)
        return self

    def of(self, part: Tensor, groups: Tensor) -> Tensor:
        """Scales or zero points [B, C N] of B channels."""
        return part.flatten(1).expand(len(groups), -1) if len(part) == 1 else part.flatten(1)[groups]

    def refit(self, group: int, w_gCN: Tensor) -> None:
        """Fit a group's grids to what it has become."""
        for c, clip in enumerate(self.clips):
            grid = self.fit(w_gCN[:, c].T[:, None], self.cost[group, None, : len(w_gCN)], clip)
            self.scale[group, c] = grid.scale[:, 0, 0]
            if self.zero is not None and grid.zero is not None:
                self.zero[group, c] = grid.zero[:, 0, 0]

    def best(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Codes [N, K], scales and zero points float32 [N, G, 1] and losses [N] of each row's best sweep."""
        pick, least = torch.zeros_like(self.loss[0], dtype=torch.long), self.loss[0]
        for c, loss in enumerate(self.loss):
            pick, least = torch.where(loss < least, c, pick), torch.minimum(loss, least)
        scale, zero = (None if part is None else _picked(part, pick).T.float()[..., None] for part in (self.scale, self.zero))
        assert scale is not None
        codes = torch.empty_like(self.codes[:, 0])
        codes[self.order] = _picked(self.codes, pick)
        return codes.T, scale, zero, least


def _picked(stack: Tensor, pick: Tensor) -> Tensor:
    """[*, C, N] and int64 [N] -> [*, N]."""
    return stack.gather(1, pick.expand(len(stack), 1, -1))[:, 0]
