"""Weights in several precisions: every part of the input channels has its bits and its scale per output channel.

    w_k ≈ s_p q_k  for every channel k of part p        gptq: one sweep with one H, the parts one after the other, high parts last
    s_p >= s_(p-1) 2^(b_(p-1) - b_p - 1)                as activations have it, and why: ops/quantize_per_token.py

Shapes:  W [N, K]   s float32 [N, P]   q int8 [N, K], in the channels' own order   H [K, K]
Why:     the channels that come last take up the rounding errors of all others, and have the bits to do so.
Source:  Saxena et al., arXiv:2412.14363, section 5.1, and their code: symmetric, clip of the 2.4-norm, blocks of 128,
         1 % damping, no act_order; with ``act_order`` channels are sorted within their part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.ops.quantize_per_token import finest
from mmqc.solvers import awq_clip, gptq, mse_clip, rtn
from mmqc.solvers.grid import Grid
from mmqc.solvers.quantized import Quantized, checked, rounded
from mmqc.solvers.second_moment import checked_hessian
from mmqc.solvers.sweep import clipped

ONE_BY_ONE = {"rtn": rtn.solve, "mse_clip": mse_clip.solve, "awq_clip": awq_clip.solve}


@dataclass(frozen=True, eq=False)
class Part:
    """Input channels (int64 [K_p], ascending) and the bits of their weights."""

    columns: Tensor
    bits: int


@dataclass(frozen=True)
class MixedQuantized(Quantized):
    """As ``Quantized``, with scales [N, P]: one for every part of the channels."""

    parts: tuple[Part, ...] = ()

    def by_channel(self, part: Tensor) -> Tensor:
        """``scale`` as it broadcasts over the codes."""
        index = torch.zeros(self.codes.shape[1], dtype=torch.long, device=part.device)
        for p, there in enumerate(self.parts):
            index[there.columns.to(part.device)] = p
        return part[:, index]


def parts_of(
    width: int, high: Tensor | None, bits: int, high_bits: int, lowest: Tensor | None = None, lowest_bits: int = 2
) -> tuple[Part, ...]:
    """The low and the high part of ``width`` channels, a third one before them; one part where ``high`` is None or empty."""
    rest = torch.arange(width)
    if high is None or not high.numel():
        return (Part(rest, bits),)
    level = torch.ones(width, dtype=torch.long).index_fill(0, high.cpu(), 2)
    if lowest is not None and lowest.numel():
        level[lowest.cpu()] = 0
    return tuple(Part(rest[level == i], b) for i, b in enumerate((lowest_bits, bits, high_bits)) if bool((level == i).any()))


def solve(
    weight: Tensor, parts: Sequence[Part], spec: WeightSpec, hessian: Tensor | None = None, *, name: str = "weight"
) -> MixedQuantized:
    """Quantizes ``weight`` [N, K] with the solver of ``spec``, whose bits the parts replace.

    Args:
        weight: floating point [N, K].
        parts: disjoint, together all K channels; the last is solved last.
        spec: solver, ``act_order``, ``damping`` and ``clip`` are read; ``best`` is ``inputs`` here.
        hessian: XᵀX [K, K] of the layer's inputs; gptq and awq_clip need it.
        name: FQN for error messages.

    Raises:
        ValueError: the weight, or the hessian, cannot be used; says why and what to do.
    """
    w = checked(weight, name)
    if sorted(torch.cat([p.columns for p in parts]).tolist()) != list(range(w.shape[1])):
        raise ValueError(f"{name}: the parts are not its {w.shape[1]} input channels, each once")
    if spec.solver == "gptq":
        return _together(w, tuple(parts), spec, checked_hessian(hessian, w, name, "gptq"), name)
    codes = torch.empty_like(w, dtype=torch.int8)
    solved: list[Quantized] = []
    for part in parts:
        columns = part.columns.to(w.device)
        h = None if hessian is None else hessian[columns.to(hessian.device)][:, columns.to(hessian.device)]
        one = ONE_BY_ONE[spec.solver](w[:, columns], replace(spec, bits=part.bits), h, name=name)
        codes[:, columns] = one.codes
        solved.append(one)
    scale = not_too_fine([one.scale for one in solved], [w[:, p.columns.to(w.device)] for p in parts], parts)
    for p, (part, one) in enumerate(zip(parts, solved, strict=True)):
        coarser, columns = scale[:, p] > one.scale, part.columns.to(w.device)
        codes[:, columns] = torch.where(
            coarser[:, None], rounded(w[:, columns], scale[:, p, None], part.bits).to(torch.int8), one.codes
        )
    return MixedQuantized(codes, scale, "; ".join(filter(None, (s.note for s in solved))), parts=tuple(parts))


def not_too_fine(scales: Sequence[Tensor], weights: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """Scales [N, P] of which each is at least what the part before it allows; rows of zeros allow everything."""
    found, least = [], torch.zeros_like(scales[0])
    for p, (scale, w) in enumerate(zip(scales, weights, strict=True)):
        if p:
            least = least * finest(parts[p - 1].bits, parts[p].bits)
        step = torch.maximum(torch.where(w.any(1), scale, 0.0), least)
        found.append(torch.where(step > 0, step, 1.0))
        least = step
    return torch.stack(found, 1)


def _together(w: Tensor, parts: tuple[Part, ...], spec: WeightSpec, h: Tensor, name: str) -> MixedQuantized:
    """GPTQ over all parts."""
    out, notes = gptq._unused(h, None)
    w = w.masked_fill(out, 0)
    columns = [part.columns.to(w.device) for part in parts]
    if spec.act_order:
        columns = [c[h.diagonal()[c].argsort(descending=True, stable=True)] for c in columns]
    order, cost, u = torch.cat(columns), torch.ones_like(w[0]), None
    if not out.all():
        h = h.clone()
        gptq._decouple_(h, out)
        u, cost, more = gptq.factored_(h, order, spec.damping, name)
        cost, notes = cost.to(w.dtype), notes + more
    clip = "inputs" if spec.how_to_clip == "best" else spec.how_to_clip  # the parts' scales bound each other: one sweep
    grids = [clipped(w[:, c][:, None], cost[None, c], clip, WeightSpec(p.bits)) for c, p in zip(columns, parts, strict=True)]
    scale = not_too_fine([grid.scale[:, 0, 0] for grid in grids], [w[:, c] for c in columns], parts)
    grids = [replace(grid, scale=scale[:, p, None, None]) for p, grid in enumerate(grids)]
    codes = torch.zeros_like(w, dtype=torch.int8)
    if u is not None:
        codes[:, order] = _sweep(w.T[order].contiguous(), grids, [len(c) for c in columns], u).T
    return MixedQuantized(codes.masked_fill(out, 0), scale, "; ".join(notes), parts=parts)


def _sweep(w_KN: Tensor, grids: Sequence[Grid], sizes: Sequence[int], u: Tensor) -> Tensor:
    """The codes int8 [K, N] of the parts, one after the other, each on its grid; ``w_KN`` is used up."""
    codes, first = torch.empty_like(w_KN, dtype=torch.int8), 0
    for grid, size in zip(grids, sizes, strict=True):
        scale, last = grid.scale[:, 0, 0].to(w_KN.dtype), first + size
        for start in range(first, last, gptq.BLOCK):
            stop = min(start + gptq.BLOCK, last)
            rows = u[start:stop].to(w_KN.dtype)
            codes[start:stop], errors = torch.ops.mmqc.gptq_block(
                w_KN[start:stop], rows[:, start:stop], scale.expand(stop - start, -1), None, grid.bits
            )
            w_KN[stop:].addmm_(rows[:, stop:].T, errors, alpha=-1)
        first = last
    return codes
