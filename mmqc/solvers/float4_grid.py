"""The grid of a block of floats of 4 bits: e2m1's numbers times a scale that the format can store.

    w ≈ q s        q = ±0, 1, 2, 3, 4, 6, 8, 12: twice e2m1        s = half of the stored scale (ops/float4.py)
    widest grid    mxfp4  2 s = 2^e, e = round(log2 max|w|) - 2, up from 1.75 of a power of two: max|w| in [3.5, 7) 2 s
                   nvfp4  2 s = float8(d max|w| / 6) / d        d = 448 · 4 / max|W|, down to a power of two

Shapes:  w [..., B]    s [..., 1]    d float32 [1], for the whole tensor
Scales:  a block may take a longer or a shorter step: mxfp4 twice or half of it, nvfp4 some of the float8 numbers around it, up to
         that which makes max|w| the number 4: beside it lie 3 and 2, half as far apart as 6 and 4.  d leaves room for that step in
         the block of the largest weight (448 is float8's largest number); with 448 · 6 / max|W|, as other projects have it, that
         block could only have max|w| = 6.  Powers of two let linears share a d afterwards without a rounding, as engines want of
         those that they compute in one product (checkpoint/compressed_tensors.py).
Source:  the widest mxfp4 grid is that of OCP Microscaling Formats v1.0, section 6.3, with compressed-tensors' rounding of the
         exponent; a step that makes max|w| 4 is "Four Over Six", arXiv:2512.02010.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmqc.config import Float4
from mmqc.ops.divide import divided
from mmqc.ops.float4 import LARGEST, read_scale, round_float4, store_scale
from mmqc.solvers.grid import Grid
from mmqc.solvers.quantized import positive

ROOM = 448.0 * 4
STEPS: dict[str, tuple[float, ...]] = {
    "mxfp4": (1.0, 2.0, 0.5),
    "nvfp4": (1.0, 1.5, 1.375, 1.25, 1.125, 0.94, 0.88, 0.8, 0.75, 0.7),
}  # that a block tries, as parts of the widest grid's; the nearest number that the format has is taken


@dataclass(frozen=True)
class Float4Grid(Grid):
    """Steps of a tensor's blocks; ``scale`` holds s.

    Attributes:
        form: "mxfp4" or "nvfp4".
        divisor: float32 [1], nvfp4's d.
    """

    form: Float4 = "nvfp4"
    divisor: Tensor | None = None

    @classmethod
    def widest(cls, w: Tensor, form: Float4, divisor: Tensor | None = None) -> Float4Grid:
        """The grids of all blocks [..., B] of a tensor; for nvfp4 the largest of them decides d, where it is not given."""
        largest = w.abs().amax(-1, keepdim=True).float()
        if form == "mxfp4":
            mantissa, exponent = torch.frexp(largest)  # mantissa in [1/2, 1): 7/8 is 1.75 of the power of two below
            half = torch.exp2((exponent + (mantissa >= 0.875).to(exponent) - 4).float())  # of 2^(log2 - 2)
            plain = cls(torch.where(largest > 0, half, 0.5), 4, None, form)
            return replace(plain, scale=plain.representable(plain.scale))
        peak = largest.max() if largest.numel() else largest.new_ones(())
        _, exponent = torch.frexp(ROOM / torch.where(peak > 0, peak, 1).clamp(min=2.0**-100))
        divisor = torch.exp2((exponent - 1).float()).reshape(1) if divisor is None else divisor
        plain = cls(positive(divided(largest, LARGEST)), 4, None, form, divisor)
        return replace(plain, scale=plain.representable(plain.scale))

    def representable(self, scale: Tensor) -> Tensor:
        """The nearest half scales that the format can store."""
        factor = 2 if self.divisor is None else 2 * self.divisor
        half = 0.5 * read_scale(store_scale(scale.float() * factor, self.form), self.form)
        return half if self.divisor is None else half / self.divisor

    def extras(self) -> dict[str, Any]:
        """The form and d."""
        return {"form": self.form, "divisor": self.divisor}

    def codes(self, w: Tensor) -> Tensor:
        """The nearest codes, still in w's dtype; ties to the even mantissa."""
        return round_float4(w / self.scale.to(w))

    def shrunk(self, factor: Tensor) -> Float4Grid:
        """With steps ``factor`` [..., 1] times as long, or the nearest to that."""
        return replace(self, scale=self.representable(self.scale * factor.float()))

    def clipped(self, unit: Tensor, p: float) -> Tensor:
        """Weights in units of the step -> their nearest values on the grid ``shrunk(p)``, in the same units."""
        step = (self.representable(self.scale * p) / self.scale).to(unit)
        return round_float4(unit / step).mul_(step)

    def shrinks(self, wanted: Iterable[float]) -> tuple[float, ...]:
        """The few steps of the format, whatever a search of integer grids would try."""
        del wanted
        return STEPS[self.form]
