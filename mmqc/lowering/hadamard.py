"""hadamard as one small matmul per Kronecker factor; the reshapes between them are free or fuse.

    y = x (F1 ⊗ … ⊗ Fr)ᵀ        for F in Fr … F1: [M n/a, a] @ Fᵀ, then the multiplied axis moves to the front
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mmqc.lowering.inductor import TensorBox, lowerings, register_lowering

aten = torch.ops.aten


def apply_factors(x: TensorBox, factors: Sequence[TensorBox]) -> TensorBox:
    """The product in x's dtype (float32 or float64)."""
    view, permute = lowerings[aten.view.default], lowerings[aten.permute.default]
    size = list(x.get_size())
    rows, n, y = math.prod(size[:-1]), size[-1], x
    for factor in reversed(factors):
        a = factor.get_size()[0]
        factor = lowerings[torch.ops.prims.convert_element_type.default](factor, x.get_dtype())
        y = lowerings[aten.mm.default](view(y, [rows * (n // a), a]), permute(factor, [1, 0]))
        y = permute(view(y, [rows, n // a, a]), [0, 2, 1])
        y = view(y, [rows, n])
    return view(y, size)


@register_lowering(torch.ops.mmqc.hadamard.default, type_promotion_kind=None)
def lower_hadamard(x: TensorBox, factors: Sequence[TensorBox]) -> TensorBox:
    """Float32 at least in between, rounded once."""
    convert = lowerings[torch.ops.prims.convert_element_type.default]
    dtype = x.get_dtype()
    y = apply_factors(convert(x, torch.promote_types(dtype, torch.float32)), factors)
    return lowerings[aten.clone.default](convert(y, dtype))
