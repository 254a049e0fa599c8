"""Descent from a rounded weight: each code, then each scale, becomes the best one beside all the others.

    minimise  tr D H Dᵀ        D = (q - z) s - w        G = D H, the loss's gradient, kept up to date

    codes of a block B      x = v_B - G_B T⁻ᵀ        for i in B: q_i = round(x_i / s + z), e_i = x_i - (q_i - z) s
                                                                 x_j <- x_j - e_i U_ij   for all j > i
                            v = (q - z) s before        T: H_BB's lower triangle        U = (T⁻¹ diag T)ᵀ
    the scale of a group g  s <- s - c·G_g / c·H_gg·c        c = q_g - z

Shapes:  W [N, K]    H [K, K]    q int8 [N, K]    s, z [N, G, 1]
Why:     GPTQ's sweep cannot come back to a channel, and its grids are chosen before it; no step here makes a row's loss larger.
Exact:   a block is one Gauss-Seidel pass over its channels, each rounded to its best code.  Unrounded, that pass is a triangular
         solve, and what rounding one channel changes for the later ones is linear in e: the sweep's own inner loop, with another U.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.solvers.float4_grid import Float4Grid
from mmqc.solvers.grid import Grid
from mmqc.solvers.second_moment import quadratic
from mmqc.solvers.sweep import PANEL, PANELS

BLOCK = 128
FARTHEST = (
    1.1  # a scale moves by at most this factor at a time: the loss is mostly that of the largest inputs, others have theirs too
)


def descend(w: Tensor, h: Tensor, codes: Tensor, grid: Grid, group_size: int, rounds: int) -> tuple[Tensor, Grid]:
    """Codes int8 [N, K] and scales that lose no more than those given.

    Args:
        w: [N, K] in float32 or float64.
        h: [K, K] in w's dtype, its diagonal positive.
        codes: int8 [N, K].
        grid: of each group, [N, G, 1]; zero points stay as they are.
        group_size: g; 0 for whole rows.  The last group may be short.
        rounds: over all groups.
    """
    state = _State(w, h, codes, grid, group_size or len(h))
    for left in reversed(range(rounds)):
        state.improve(slice(0, len(h)), 0, last=not left)
    return state.codes.T, replace(grid, scale=state.scale.T[..., None].float().contiguous())


class _State:
    """Everything transposed, a channel a row: codes, values and gradient [K, N], scales and zero points [G, N].

    Channels are nested spans: all, panels or groups, whichever are larger, the other ones, blocks.  What a span has changed reaches
    the rest of the span around it in one product.
    """

    def __init__(self, w: Tensor, h: Tensor, codes: Tensor, grid: Grid, size: int) -> None:
        self.h, self.grid, self.size, self.codes = h, grid, size, codes.T.contiguous()
        self.scale = grid.scale[..., 0].T.to(w.dtype).contiguous()
        self.zero = None if grid.zero is None else grid.zero[..., 0].T.to(w.dtype).contiguous()
        self.values = torch.cat([self.centred(g) * self.scale[g] for g in range(len(self.scale))])
        self.gradient = h @ (self.values - w.T)
        panel = PANELS.get(h.device.type, PANEL) // min(size, BLOCK) * min(size, BLOCK)
        panel = panel // size * size if panel > size else panel  # whole groups, or a part of one
        self.widths = sorted({size, *({panel} if panel else ()), min(size, BLOCK)}, reverse=True)
        starts = [start for g in range(len(self.scale)) for start in range(self.span(g).start, self.span(g).stop, BLOCK)]
        self.factors = dict(zip(starts, _factors(h, starts, min(BLOCK, size)), strict=True))

    def span(self, group: int) -> slice:
        """The channels of a group."""
        return slice(group * self.size, min((group + 1) * self.size, len(self.h)))

    def centred(self, group: int) -> Tensor:
        """Codes minus zero points [g, N]."""
        codes = self.codes[self.span(group)].to(self.scale.dtype)
        return codes if self.zero is None else codes - self.zero[group]

    def improve(self, at: slice, level: int, last: bool) -> None:
        """The codes and scales of a span, from one of the spans in it to the next; the gradient follows within it.

        In the ``last`` round the groups in front see nothing of it any more.
        """
        if level == len(self.widths):
            self.recode(at)
            return
        width = self.widths[level]
        for start in range(at.start, at.stop, width):
            part = slice(start, min(start + width, at.stop))
            front = slice(at.start, at.start if last and width >= self.size else start)
            rest = [other for other in (front, slice(part.stop, at.stop)) if other.start < other.stop]
            before = self.values[part].clone() if rest else None
            self.improve(part, level + 1, last)
            if width == self.size:
                self.rescale(start // width, part, last)
            if before is not None:
                change = self.values[part] - before
                for other in rest:
                    self.gradient[other].addmm_(self.h[other, part], change)

    def recode(self, block: slice) -> None:
        """One pass over the channels of a block."""
        group, size = block.start // self.size, block.stop - block.start
        inverse, u = (factor[:size, :size] for factor in self.factors[block.start])
        x = self.values[block] - inverse @ self.gradient[block]
        scale, zero = (None if t is None else t[group].expand(size, -1) for t in (self.scale, self.zero))
        codes, _ = torch.ops.mmqc.gptq_block(x, u, scale, zero, self.grid.bits, isinstance(self.grid, Float4Grid))
        values = (codes.to(x) if zero is None else codes.to(x) - zero) * scale
        self.gradient[block].addmm_(self.h[block, block], values - self.values[block])
        self.codes[block], self.values[block] = codes, values

    def rescale(self, group: int, at: slice, last: bool) -> None:
        """The scales of a group that are best for its codes; the gradient follows, unless nobody reads it any more."""
        c = self.centred(group)
        along = None if last else self.h[at, at] @ c
        s, curvature = self.scale[group], (quadratic(self.h[at, at], c) if along is None else c * along).sum(0)
        slope = (c * self.gradient[at]).sum(0)
        wanted = s - slope / curvature
        near = (curvature > 0) & (wanted > s / FARTHEST) & (wanted < s * FARTHEST)
        step = self.grid.representable(torch.where(near, wanted, s)).to(s) - s
        step = torch.where(step * (2 * slope + step * curvature) < 0, step, 0)  # the nearest that can be stored may be worse
        self.scale[group] += step
        self.values[at] = c * self.scale[group]
        if along is not None:
            self.gradient[at].addcmul_(along, step)


def _factors(h: Tensor, starts: list[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(T⁻¹, U) [size, size] of the block at each of ``starts``, which may reach over the end of its group, or of H."""
    channels = torch.tensor(starts, device=h.device)[:, None] + torch.arange(size, device=h.device)
    squares = h[channels.clamp(max=len(h) - 1)[:, :, None], channels.clamp(max=len(h) - 1)[:, None]].double()
    beyond = channels >= len(h)  # the same channel again, which would be singular
    squares = torch.where(beyond[:, :, None] | beyond[:, None], torch.eye(size).to(squares), squares)
    eye = torch.eye(size).to(squares).expand_as(squares)
    inverses = torch.linalg.solve_triangular(squares.tril(), eye, upper=False)
    u = (inverses * squares.diagonal(dim1=1, dim2=2)[:, None]).mT.to(h.dtype).contiguous()
    return zip(inverses.to(h.dtype), u, strict=True)
