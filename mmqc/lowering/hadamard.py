"""hadamard as one small matmul per Kronecker factor, without a transposition.

    y = x (F1 ⊗ … ⊗ Fr)ᵀ        last factor: [·, a] @ Fᵀ;  others: F @ [·, a, rest], batched, F shared by the batch

Shapes:  those of ops/hadamard.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mmqc.lowering.inductor import TensorBox, batched_matmul, convert, lowerings, register_lowering, static_int

aten = torch.ops.aten


def apply_factors(x: TensorBox, factors: Sequence[TensorBox]) -> TensorBox:
    """The product in x's dtype (float32 or float64)."""
    view, permute, expand = (
        lowerings[aten.view.default],
        lowerings[aten.permute.default],
        lowerings[aten.expand.default],
    )
    size = list(x.get_size())
    rows, n, rest, y = math.prod(size[:-1]), static_int(size[-1]), 1, x
    for factor in reversed(factors):
        factor, a = convert(factor, x.get_dtype()), static_int(factor.get_size()[0])
        batch = rows * (n // (a * rest))
        if rest == 1:
            y = lowerings[aten.mm.default](view(y, [batch, a]), permute(factor, [1, 0]))
        else:
            y = batched_matmul(expand(factor, [batch, a, a]), view(y, [batch, a, rest]))
        rest = rest * a
    return view(y, size)


@register_lowering(torch.ops.mmqc.hadamard.default, type_promotion_kind=None)
def lower_hadamard(x: TensorBox, factors: Sequence[TensorBox]) -> TensorBox:
    """Float32 at least in between, rounded once."""
    dtype = x.get_dtype()
    y = convert(apply_factors(convert(x, torch.promote_types(dtype, torch.float32)), factors), dtype)
    return y if factors else lowerings[aten.clone.default](y)
