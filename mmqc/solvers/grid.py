"""The integer grid of a row or a group: a step, and where zero lies on it.

    w ≈ (q - z) s        q integer in [-2^(b-1), 2^(b-1) - 1]        q = round(w / s + (z - round(z))) + round(z), clamped
    symmetric    s = max|w| / (2^(b-1) - 1)                          z = 0
    asymmetric   s = (max(w, 0) - min(w, 0)) / (2^b - 1)             z = -2^(b-1) - round(min(w, 0) / s)
    float zero   s = (max(w) - min(w)) / (2^b - 1)                   z = float16(-2^(b-1) - min(w) / s)

Shapes:  w [..., g]    s, z [..., 1]: one grid for the last axis
Zero is on the grid of the first two, so that padding and pruned channels cost nothing (GPTQ's quantizer, arXiv:2210.17323); on the
third it lies between the codes, or outside of them (HQQ, Badri & Shaji 2023), and is rounded to what is stored before w is.
Float16: with s at least max|w| / 1024 its steps at z are at most 1, so that an end misses its code by half a step at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmqc.ops.divide import divided
from mmqc.solvers.quantized import Quantized, levels, positive, rounded

LEAST = torch.finfo(torch.float32).smallest_normal  # of steps whose inverse is taken
FARTHEST = 1024  # a zero point between the codes lies at most so many steps from the weights


@dataclass(frozen=True)
class Grid:
    """Steps and zero points; ``zero`` is None on a symmetric grid.

    Attributes:
        scale: float32 [..., 1], positive.
        bits: of a code.
        zero: float32 [..., 1], integers; or float16, anything.
    """

    scale: Tensor
    bits: int
    zero: Tensor | None = None

    @classmethod
    def of(cls, w: Tensor, bits: int, symmetric: bool = True, float_zero: bool = False) -> Grid:
        """The widest grid: it reaches every value of the last axis of ``w``."""
        if float_zero:
            return cls.between(w.amin(-1, keepdim=True), w.amax(-1, keepdim=True), bits)
        if symmetric:
            return cls(positive(divided(w.abs().amax(-1, keepdim=True), levels(bits)[1])), bits)
        low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
        scale = positive(divided(high - low, 2**bits - 1)).clamp_(min=LEAST)
        return cls(scale, bits, levels(bits)[0] - torch.round(low / scale.to(w)).float())

    @classmethod
    def between(cls, low: Tensor, high: Tensor, bits: int) -> Grid:
        """The grid whose first code is ``low`` [..., 1] and whose last one is ``high``, but for what float16 rounds off zero."""
        least = divided(torch.maximum(low.abs(), high.abs()), FARTHEST)
        scale = positive(torch.maximum(divided(high - low, 2**bits - 1), least))
        return cls(scale, bits, (levels(bits)[0] - low / scale.to(low)).half())

    def codes(self, w: Tensor) -> Tensor:
        """The nearest codes, still in w's dtype; ties to even."""
        if self.zero is None:
            return rounded(w, self.scale, self.bits)
        whole, part = self._split_zero(w)
        return torch.round((w / self.scale.to(w)).add_(part)).add_(whole).clamp_(*levels(self.bits))

    def _split_zero(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest codes of the zero points, and what they are more than these: 0 for integers."""
        assert self.zero is not None, "a symmetric grid has its zero in the middle"
        zero = self.zero.to(like)
        whole = torch.round(zero)
        return whole, zero - whole

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
        whole, part = self._split_zero(unit)
        low, high = (end - whole for end in levels(self.bits))
        return torch.round((unit / p).add_(part)).clamp_(low, high).sub_(part).mul_(p)


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
    scale, zero = grid.scale[..., 0], None if grid.zero is None else grid.zero[..., 0]
    zero = zero if zero is None else zero.to(zero.dtype if zero.dtype == torch.float16 else torch.int8).contiguous()
    if not group_size:
        scale, zero = scale[:, 0], None if zero is None else zero[:, 0]
    short = codes.shape[1] % group_size if group_size else 0
    notes = filter(None, (note, f"the last group has {short} of {group_size} input channels" if short else ""))
    return Quantized(codes.contiguous(), scale.contiguous(), "; ".join(notes), zero, group_size, **grid.extras())
