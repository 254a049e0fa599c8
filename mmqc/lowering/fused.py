"""The fused ops: on CUDA one kernel each; elsewhere the operations that they stand for, one by one.

scaled_matmuls, weight_only_matmuls     q, k and v; gate and up
hadamard_quantize, …_kept               the gate, the transform and the quantization in front of a down_proj
"""

from __future__ import annotations

from typing import Any

import torch

from mmqc.lowering.hadamard import lower_hadamard, takes_transform
from mmqc.lowering.hadamard import on_cuda as rows_on_cuda
from mmqc.lowering.inductor import TensorBox, call_kernel, convert, lowerings, register_lowering
from mmqc.lowering.quantize import checked_code, lower_quantize
from mmqc.lowering.scaled_matmul import lower_scaled_matmul, on_cuda, takes_kernel
from mmqc.lowering.weight_only_matmul import lower_weight_only_matmul

aten, mmqc_ops = torch.ops.aten, torch.ops.mmqc


@register_lowering(mmqc_ops.scaled_matmuls.default, type_promotion_kind=None)
def lower_scaled_matmuls(
    x_q: TensorBox,
    w_q: list[TensorBox],
    x_scale: TensorBox,
    w_scale: list[TensorBox],
    bias: list[TensorBox | None],
    visual: TensorBox | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: list[TensorBox] | None = None,
    group_size: int = 0,
) -> Any:
    """A list of tensors."""
    if takes_kernel(x_q):
        if not on_cuda().scaled_is_called(x_q, w_q, w_scale, bias, out_dtype, group_scale, group_size):
            return on_cuda().scaled(x_q, w_q, x_scale, w_scale, bias, visual, out_dtype, group_scale, group_size)
        op = mmqc_ops.scaled_matmuls.default
        return call_kernel(op, x_q, w_q, x_scale, w_scale, bias, visual, weight_bits, out_dtype, group_scale, group_size)
    return [
        lower_scaled_matmul(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype, t, group_size)
        for w, s, b, t in zip(w_q, w_scale, bias, group_scale or [None] * len(w_q), strict=True)
    ]


@register_lowering(mmqc_ops.weight_only_matmuls.default, type_promotion_kind=None)
def lower_weight_only_matmuls(
    x: TensorBox, w_q: list[TensorBox], w_scale: list[TensorBox], bias: list[TensorBox | None], weight_bits: int, group_size: int
) -> Any:
    """A list of tensors."""
    if takes_kernel(x):
        return on_cuda().weight_only(x, w_q, w_scale, bias, weight_bits, group_size)
    return [lower_weight_only_matmul(x, w, s, b, weight_bits, group_size) for w, s, b in zip(w_q, w_scale, bias, strict=True)]


@register_lowering(mmqc_ops.hadamard_quantize.default, type_promotion_kind=None)
def lower_hadamard_quantize(
    x: TensorBox,
    up: TensorBox | None,
    factors: list[TensorBox],
    scale: TensorBox,
    visual: TensorBox | None,
    bits: int,
    code: torch.dtype | None = None,
) -> TensorBox:
    """The kernel, or the gate as pointwise IR, hadamard's matmuls and quantize's pointwise node."""
    if takes_transform(x, up, bits, kind := checked_code(x, bits, code)):
        if rows_on_cuda().is_called(x):
            return call_kernel(mmqc_ops.hadamard_quantize.default, x, up, factors, scale, visual, bits, code)
        return rows_on_cuda().transform(x, up, scale, visual, bits, kind)
    return lower_quantize(lower_hadamard(x if up is None else gate_in_front(x, up), factors), scale, visual, bits, code)


@register_lowering(mmqc_ops.hadamard_quantize_kept.default, type_promotion_kind=None)
def lower_hadamard_quantize_kept(
    x: TensorBox,
    up: TensorBox | None,
    factors: list[TensorBox],
    kept: TensorBox,
    scale: TensorBox,
    visual: TensorBox | None,
    bits: int,
    code: torch.dtype | None = None,
) -> tuple[TensorBox, TensorBox]:
    """The same, and some channels of the transform."""
    if takes_transform(x, up, bits, kind := checked_code(x, bits, code)):
        if rows_on_cuda().is_called(x):
            called: Any = call_kernel(mmqc_ops.hadamard_quantize_kept.default, x, up, factors, kept, scale, visual, bits, code)
            return called
        found = rows_on_cuda().transform_kept(x, up, kept, scale, visual, bits, kind)
        if found is not None:
            return found
    y = lower_hadamard(x if up is None else gate_in_front(x, up), factors)
    channels = [*[None] * (len(y.get_size()) - 1), kept]
    return lower_quantize(y, scale, visual, bits, code), lowerings[aten.index.Tensor](y, channels)


def gate_in_front(x: TensorBox, up: TensorBox) -> TensorBox:
    """silu(x) * up."""
    wide = convert(x, torch.promote_types(x.get_dtype(), torch.float32))
    silu = lowerings[aten.mul.Tensor](wide, lowerings[aten.sigmoid.default](wide))
    return lowerings[aten.mul.Tensor](convert(silu, x.get_dtype()), up)
