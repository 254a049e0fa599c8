"""hadamard_quantize, and some channels of what it quantizes as they are: those that magnitude suppression keeps apart.

    y = hadamard(h)        q = quantize(y, s_x)        y_S = y[..., S]

Shapes:  S int64 [r], channels   y_S [..., r] in x's dtype   the rest as in hadamard_quantize.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops import hadamard, hadamard_quantize, quantize
from mmqc.ops.define import define

MOST = 32  # channels that kernels keep


def check(x: Tensor, up: Tensor | None, kept: Tensor) -> None:
    """Raise unless the operands fit each other."""
    hadamard_quantize.check(x, up)
    if kept.dim() != 1 or kept.dtype != torch.int64:
        raise ValueError(f"channels that are kept are an int64 vector, not {kept.dtype} {list(kept.shape)}")


def reference(
    x: Tensor,
    up: Tensor | None,
    factors: list[Tensor],
    kept: Tensor,
    scale: Tensor,
    visual: Tensor | None,
    bits: int,
    code: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One after the other, each rounded to x's dtype as in the unfused model."""
    check(x, up, kept)
    y = hadamard.reference(x if up is None else F.silu(x) * up, factors)
    return quantize.reference(y, scale, visual, bits, code), y.index_select(-1, kept)


def fake(
    x: Tensor,
    up: Tensor | None,
    factors: list[Tensor],
    kept: Tensor,
    scale: Tensor,
    visual: Tensor | None,
    bits: int,
    code: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes like x, and r channels of each row."""
    check(x, up, kept)
    y = hadamard.fake(x, factors)
    return quantize.fake(y, scale, visual, bits, code), y.new_empty((*y.shape[:-1], kept.shape[0]))


define(
    "hadamard_quantize_kept(Tensor x, Tensor? up, Tensor[] factors, Tensor kept, Tensor scale, Tensor? visual, int bits, "
    "ScalarType? code=None) -> (Tensor, Tensor)",
    reference,
    fake,
)
