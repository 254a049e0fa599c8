"""The gradients of a weight whose rounding is being learned (learned_round.py), by offsets and stretches; round passes them on.

    dv = dw s  where c + v rounds into the grid, else 0        dt = s Σ (q - z) dw        q = clamp(round(c + v))

Shapes:  c int8 [M, g]   v, dv, dw fp32 [M, g]   s, z, dt fp32 [M, 1], z None for 0
         s = s₀ exp(t) is a group's step as it is now, dt the gradient by t
Source:  AutoRound (Cheng et al., arXiv:2309.05516), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.learned_round import bounds, centred, check


def reference(
    codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, of_weight: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """The formulas; what lies on the grid's border is outside."""
    check(codes, offset, step, zero, bits, of_weight)
    of_stretch = centred(codes, offset, zero, bits).mul_(of_weight).sum(1, keepdim=True).mul_(step)
    low, high = bounds(bits)
    return torch.ops.aten.hardtanh_backward(of_weight * step, codes + offset, low - 0.5, high + 0.5), of_stretch


def fake(codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, of_weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Shaped like offsets and steps."""
    check(codes, offset, step, zero, bits, of_weight)
    return torch.empty_like(offset), torch.empty_like(step)


define(
    "learned_round_gradients(Tensor codes, Tensor offset, Tensor step, Tensor? zero, Tensor of_weight, int bits)"
    " -> (Tensor, Tensor)",
    reference,
    fake,
)
