"""quantize as one pointwise node, which fuses with whatever produced x (a norm, an activation, another epilogue).

    q = clamp(round(x / s_row), -2^(b-1), 2^(b-1) - 1)

Shapes:  those of ops/quantize.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import Integer

from mmqc.lowering.inductor import Pointwise, TensorBox, lowerings, ops, register_lowering

aten = torch.ops.aten


def row_scale_loader(
    scale: TensorBox, visual: TensorBox | None, rows: Sequence[Any], dtype: torch.dtype
) -> Callable[[Sequence[Any]], Any]:
    """Index of a row -> its scale in ``dtype``."""
    load, zero, one = scale.make_loader(), Integer(0), Integer(1)
    if visual is None:
        return lambda row: ops.to_dtype(load([zero]), dtype)
    is_visual = lowerings[aten.expand.default](visual, list(rows)).make_loader()
    return lambda row: ops.to_dtype(ops.where(is_visual(row), load([one]), load([zero])), dtype)


@register_lowering(torch.ops.mmqc.quantize.default, type_promotion_kind=None)
def lower_quantize(x: TensorBox, scale: TensorBox, visual: TensorBox | None, bits: int) -> TensorBox:
    """Pointwise IR, int8."""
    size = list(x.get_size())
    dtype = torch.promote_types(x.get_dtype(), torch.float32)
    load, load_scale = x.make_loader(), row_scale_loader(scale, visual, size[:-1], dtype)
    top = float(2 ** (bits - 1))

    def inner(index: Sequence[Any]) -> Any:
        value = ops.truediv(ops.to_dtype(load(index), dtype), load_scale(index[:-1]))
        value = ops.maximum(ops.round(value), ops.constant(-top, dtype))
        return ops.to_dtype(ops.minimum(value, ops.constant(top - 1, dtype)), torch.int8)

    return Pointwise.create(device=x.get_device(), dtype=torch.int8, inner_fn=inner, ranges=size)
