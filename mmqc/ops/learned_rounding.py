"""A weight whose rounding is being learned, and the gradients of what is learned.

    learned_round               w = (q - z) s                     q = clamp(round(c + v))
    learned_round_gradients     dv = dw s  where c + v rounds into the grid, else 0        dt = s Σ (q - z) dw

Shapes:  c int8 [M, g], a group of weights a row: the codes at the start   v, dv, dw fp32 [M, g]   s, z, dt fp32 [M, 1]
         w [M, g] in the dtype asked for   z: None for 0
         s = s₀ exp(t) is a group's step as it is now, dt the gradient by t
Source:  AutoRound (Cheng et al., arXiv:2309.05516), section 3; round passes gradients on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def check(codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, bits: int, of_weight: Tensor | None = None) -> None:
    """Raise unless shapes and dtypes fit."""
    groups, whole = (codes.shape[0], 1), [t for t in (offset, of_weight) if t is not None]
    scales = [t for t in (step, zero) if t is not None]
    if codes.dim() != 2 or any(t.shape != codes.shape for t in whole) or any(t.shape != groups for t in scales):
        shapes = [list(t.shape) for t in (codes, *whole, *scales)]
        raise ValueError(f"learned_round: codes, offsets and gradients are [M, g], steps and zeros [M, 1]; got {shapes}")
    if codes.dtype != torch.int8 or any(t.dtype != torch.float32 for t in (*whole, *scales)):
        raise ValueError("learned_round: codes are int8, everything else is float32")
    if not 2 <= bits <= 8:
        raise ValueError(f"learned_round: bits = {bits}: 2 to 8")


def _bounds(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _centred(codes: Tensor, offset: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """q - z in float32."""
    q = (codes + offset).round_().clamp_(*_bounds(bits))
    return q if zero is None else q.sub_(zero)


def reference(codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    """The formula; ties to even."""
    check(codes, offset, step, zero, bits)
    return _centred(codes, offset, zero, bits).mul_(step).to(dtype)


def fake(codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    """Shaped like the codes."""
    check(codes, offset, step, zero, bits)
    return torch.empty_like(offset, dtype=dtype)


def reference_gradients(
    codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, of_weight: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """The formulas; what lies on the grid's border is outside."""
    check(codes, offset, step, zero, bits, of_weight)
    of_stretch = _centred(codes, offset, zero, bits).mul_(of_weight).sum(1, keepdim=True).mul_(step)
    low, high = _bounds(bits)
    return torch.ops.aten.hardtanh_backward(of_weight * step, codes + offset, low - 0.5, high + 0.5), of_stretch


def fake_gradients(
    codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, of_weight: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Shaped like offsets and steps."""
    check(codes, offset, step, zero, bits, of_weight)
    return torch.empty_like(offset), torch.empty_like(step)


_OPERANDS = "Tensor codes, Tensor offset, Tensor step, Tensor? zero"
define(f"learned_round({_OPERANDS}, int bits, ScalarType dtype) -> Tensor", reference, fake)
define(f"learned_round_gradients({_OPERANDS}, Tensor of_weight, int bits) -> (Tensor, Tensor)", reference_gradients, fake_gradients)
