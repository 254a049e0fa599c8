"""The integer grid of a row or a group: a step, and where zero lies on it.

    w ≈ (q - z) s        q, z integer in [-2^(b-1), 2^(b-1) - 1]
    symmetric    s = max|w| / (2^(b-1) - 1)                          z = 0
    asymmetric   s = (max(w, 0) - min(w, 0)) / (2^b - 1)             z = -2^(b-1) - round(min(w, 0) / s)

Shapes:  w [..., g]    s, z [..., 1]: one grid for the last axis
Zero is always on the grid, so that padding and pruned channels cost nothing (GPTQ's quantizer, arXiv:2210.17323).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmqc.ops.divide import divided
from mmqc.solvers.quantized import Quantized, levels, positive, rounded


@dataclass(frozen=True)
class Grid:
    """Steps and zero points; ``zero`` is None on a symmetric grid.

    Attributes:
        scale: float32 [..., 1], positive.
        bits: of a code.
        zero: float32 [..., 1], integers.
    """

    scale: Tensor
    bits: int
    zero: Tensor | None = None

    @classmethod
    def of(cls, w: Tensor, bits: int, symmetric: bool = True) -> Grid:
        """The widest grid: it reaches every value of the last axis of ``w``."""
        if symmetric:
            return cls(positive(divided(w.abs().amax(-1, keepdim=True), levels(bits)[1])), bits)
        low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
        scale = positive(divided(high - low, 2**bits - 1))
        return cls(scale, bits, levels(bits)[0] - torch.round(low / scale.to(w)).float())

    def codes(self, w: Tensor) -> Tensor:
        """The nearest codes, still in w's dtype; ties to even."""
        if self.zero is None:
            return rounded(w, self.scale, self.bits)
        return (torch.round(w / self.scale.to(w)) + self.zero.to(w)).clamp_(*levels(self.bits))

    def extras(self) -> dict[str, Any]:
        """What ``Quantized`` has to know beside steps and zero points."""
        return {}

    def values(self, codes: Tensor) -> Tensor:
        """What codes stand for."""
        centred = codes if self.zero is None else codes - self.zero.to(codes)
        return centred * self.scale.to(codes)

    def representable(self, scale: Tensor) -> Tensor:
        """Steps that can be stored: float32."""
        return scale.float()

    def shrinks(self, wanted: Iterable[float]) -> tuple[float, ...]:
        """The factors for ``shrunk`` that a search is to try."""
        return tuple(wanted)

    def shrunk(self, factor: Tensor) -> Grid:
        """With steps ``factor`` [..., 1] times as long: the ends are clipped, zero stays where it is."""
        return replace(self, scale=positive(self.scale * factor.float()))

    def clipped(self, unit: Tensor, p: float) -> Tensor:
        """Weights in units of the step -> their nearest values on a grid of steps p, in the same units."""
        if self.zero is None:
            return torch.round(unit / p).clamp_(*levels(self.bits)).mul_(p)
        low, high = (end - self.zero.to(unit) for end in levels(self.bits))
        return torch.round(unit / p).clamp(low, high).mul_(p)


def grouped(w: Tensor, group_size: int) -> Tensor:
    """[N, K] -> [N, ceil(K/g), g], the last group filled up with zeros; [N, 1, K] for g = 0."""
    if not group_size:
        return w[:, None]
    padding = -w.shape[1] % group_size
    return torch.nn.functional.pad(w, (0, padding)).unflatten(1, (-1, group_size))


def on_grid(groups: Tensor, grid: Grid, width: int, group_size: int, note: str = "") -> Quantized:
    """Round ``groups`` [N, G, g] to their grids."""
    return packed(grid.codes(groups).to(torch.int8).flatten(1)[:, :width], grid, group_size, note)


def packed(codes: Tensor, grid: Grid, group_size: int, note: str = "") -> Quantized:
    """Codes [N, K] and a grid for each of [N, G, 1], as every solver returns them."""
    scale, zero = grid.scale[..., 0], None if grid.zero is None else grid.zero[..., 0].to(torch.int8)
    if not group_size:
        scale, zero = scale[:, 0], None if zero is None else zero[:, 0]
    short = codes.shape[1] % group_size if group_size else 0
    notes = filter(None, (note, f"the last group has {short} of {group_size} input channels" if short else ""))
    return Quantized(codes.contiguous(), scale.contiguous(), "; ".join(notes), zero, group_size, **grid.extras())
