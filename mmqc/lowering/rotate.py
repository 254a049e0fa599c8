"""rotate as hadamard's matmuls with the signs in a pointwise prologue or epilogue.

    x R = ((x ∘ σ) F),   x Rᵀ = (x Fᵀ) ∘ σ

Shapes:  those of ops/rotate.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmqc.lowering.hadamard import apply_factors
from mmqc.lowering.inductor import TensorBox, convert, lowerings, register_lowering

aten = torch.ops.aten


@register_lowering(torch.ops.mmqc.rotate.default, type_promotion_kind=None)
def lower_rotate(x: TensorBox, factors: Sequence[TensorBox], signs: TensorBox, inverse: bool) -> TensorBox:
    """Float32 at least in between, rounded once."""
    mul = lowerings[aten.mul.Tensor]
    dtype = x.get_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    x, signs = convert(x, wide), convert(signs, wide)
    if inverse:
        return convert(mul(apply_factors(x, factors), signs), dtype)
    transposed = [lowerings[aten.permute.default](f, [1, 0]) for f in factors]
    return convert(apply_factors(mul(x, signs), transposed), dtype)
