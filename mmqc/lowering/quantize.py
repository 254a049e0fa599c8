"""quantize as one pointwise node, which fuses with whatever produced x (a norm, an activation, another epilogue).

On CUDA many rows that are in memory already are a kernel's (kernels/rows/quantize.py).

    q = clamp(round(x / s_row), -2^(b-1), 2^(b-1) - 1)        float8: float8(clamp(x / s_row, -448, 448))

Shapes:  those of ops/quantize.py
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import Integer

from mmqc.lowering.in_memory import is_in_memory
from mmqc.lowering.inductor import Pointwise, TensorBox, has_kernel, lowerings, ops, register_lowering
from mmqc.ops.pack import FLOAT8
from mmqc.ops.quantize import LARGEST, code_dtype

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


def checked_code(x: TensorBox, bits: int, code: torch.dtype | None) -> torch.dtype:
    """The dtype of the codes.

    Raises:
        RuntimeError: float8 codes on a device that has no conversion to them.
    """
    kind, device = code_dtype(bits, code), x.get_device_or_error()
    if kind == FLOAT8 and device.type == "cuda":
        from mmqc.kernels.shared.device_facts import fp8_reason  # imports Triton

        if (reason := fp8_reason(device)) is not None:
            raise RuntimeError(
                f"{reason}: run this model without torch.compile, or quantize it to integers (without QuantConfig.with_float8)"
            )
    return kind


@register_lowering(torch.ops.mmqc.quantize.default, type_promotion_kind=None)
def lower_quantize(
    x: TensorBox, scale: TensorBox, visual: TensorBox | None, bits: int, code: torch.dtype | None = None
) -> TensorBox:
    """Pointwise IR, or a launch; int8 or float8."""
    if has_kernel(x) and is_in_memory(x):
        rows_on_cuda: Any = importlib.import_module("mmqc.lowering.rows_on_cuda")  # imports Triton
        q = rows_on_cuda.quantize(x, scale, visual, bits, checked_code(x, bits, code))
        if q is not None:
            return q
    size = list(x.get_size())
    dtype = torch.promote_types(x.get_dtype(), torch.float32)
    load, load_scale = x.make_loader(), row_scale_loader(scale, visual, size[:-1], dtype)
    top, kind = float(2 ** (bits - 1)), checked_code(x, bits, code)
    low, high = (-LARGEST, LARGEST) if kind == FLOAT8 else (-top, top - 1)

    def inner(index: Sequence[Any]) -> Any:
        value = ops.truediv(ops.to_dtype(load(index), dtype), load_scale(index[:-1]))
        value = ops.to_dtype(value, torch.float32) if kind == FLOAT8 else ops.round(value)
        wide = torch.float32 if kind == FLOAT8 else dtype
        value = ops.minimum(ops.maximum(value, ops.constant(low, wide)), ops.constant(high, wide))
        return ops.to_dtype(value, kind)

    return Pointwise.create(device=x.get_device(), dtype=kind, inner_fn=inner, ranges=size)
