"""A weight whose rounding is being learned, as it is now.

    w = (q - z) s        q = clamp(round(c + v))

Shapes:  c int8 [M, g], a group of weights a row: the codes at the start   v fp32 [M, g]   s, z fp32 [M, 1], z None for 0
         w [M, g] in the dtype asked for
Source:  AutoRound (Cheng et al., arXiv:2309.05516), section 3.
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


def bounds(bits: int) -> tuple[int, int]:
    """The lowest and the highest code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def centred(codes: Tensor, offset: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """q - z in float32."""
    q = (codes + offset).round_().clamp_(*bounds(bits))
    return q if zero is None else q.sub_(zero)


def reference(codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    """The formula; ties to even."""
    check(codes, offset, step, zero, bits)
    return centred(codes, offset, zero, bits).mul_(step).to(dtype)


def fake(codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    """Shaped like the codes."""
    check(codes, offset, step, zero, bits)
    return torch.empty_like(offset, dtype=dtype)


define(
    "learned_round(Tensor codes, Tensor offset, Tensor step, Tensor? zero, int bits, ScalarType dtype) -> Tensor", reference, fake
)
