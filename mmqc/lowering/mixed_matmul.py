"""mixed_matmul: on CUDA the Triton kernel; elsewhere an integer product a part and one pointwise epilogue.

Shapes:  those of ops/mixed_matmul.py
What ``_int_mm`` cannot take is padded or multiplied in another way, and ``why_not`` says so for the record.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from sympy import Integer
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mmqc import kernels
from mmqc.lowering.inductor import (
    Pointwise,
    TensorBox,
    call_kernel,
    current_node,
    has_kernel,
    lowerings,
    ops,
    register_lowering,
    static_int,
)
from mmqc.lowering.pack import unpack
from mmqc.lowering.scaled_matmul import int_matmul, traced_operands
from mmqc.ops.integer_matmul import CUDA_MIN_ROWS, why_not_int_mm

aten = torch.ops.aten


def on_cuda() -> Any:
    """The launches, which need Triton."""
    return importlib.import_module("mmqc.lowering.mixed_on_cuda")


def why_not(node: fx.Node) -> str | None:
    """None, or why the kernel (on CUDA), or the plain ``_int_mm``, cannot take this node of an ATen graph as it is."""
    x_q, _, _, w_q, w_scale, _, _, widths, weight_bits, out_dtype = traced_operands(node)
    if x_q.device.type == "cuda" and kernels.install():
        return on_cuda().why_not(w_scale.shape[0], widths, weight_bits, out_dtype, x_q.device)
    rows = math.prod(x_q.shape[:-1])
    large, one = statically_known_true(rows >= CUDA_MIN_ROWS), statically_known_true(rows == 1)
    reasons = (why_not_int_mm(x_q.device.type, large, w.shape[0], k, one) for w, k in zip(w_q, widths, strict=True))
    return next((reason for reason in reasons if reason), None)


@register_lowering(torch.ops.mmqc.mixed_matmul.default, type_promotion_kind=None)
def lower_mixed_matmul(
    x_q: TensorBox,
    x_scale: TensorBox,
    x_offset: TensorBox,
    w_q: Sequence[TensorBox],
    w_scale: TensorBox,
    w_sum: TensorBox,
    bias: TensorBox | None,
    widths: Sequence[int],
    weight_bits: Sequence[int],
    out_dtype: torch.dtype,
) -> TensorBox:
    """A kernel, or integer products and then pointwise IR."""
    if has_kernel(x_q) and why_not(current_node()) is None:
        if on_cuda().is_called(x_q, w_scale, widths, weight_bits, out_dtype):
            op = torch.ops.mmqc.mixed_matmul.default
            return call_kernel(op, x_q, x_scale, x_offset, w_q, w_scale, w_sum, bias, widths, weight_bits, out_dtype)
        return on_cuda().mixed(x_q, x_scale, x_offset, w_q, w_scale, w_sum, bias, widths, weight_bits, out_dtype)
    rows, n = list(x_q.get_size()[:-1]), static_int(w_scale.get_size()[0])
    flat = lowerings[aten.view.default](x_q, [math.prod(rows), sum(widths)])
    size, dtype = [*rows, n], torch.promote_types(out_dtype, torch.float32)
    loads, start = [], 0
    for w, width, bits in zip(w_q, widths, weight_bits, strict=True):
        part = lowerings[aten.slice.Tensor](flat, 1, start, start + width)
        start += width
        acc = int_matmul(part, unpack(w, width, bits), n, width)
        loads.append(lowerings[aten.view.default](acc, size).make_loader())
    load_s, load_o, load_w, load_c = (t.make_loader() for t in (x_scale, x_offset, w_scale, w_sum))
    load_bias = None if bias is None else bias.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        row, col = list(index[:-1]), index[-1]
        total = None
        for p, load in enumerate(loads):
            at, to = Integer(p), lambda value: ops.to_dtype(value, dtype)
            s_w = to(load_w([col, at]))
            value = ops.mul(ops.mul(to(load(index)), to(load_s([*row, at]))), s_w)
            shift = ops.mul(to(load_o([*row, at])), ops.mul(s_w, to(load_c([col, at]))))
            value = ops.add(value, shift)
            total = value if total is None else ops.add(total, value)
        if load_bias is not None:
            total = ops.add(total, ops.to_dtype(load_bias([col]), dtype))
        return ops.to_dtype(total, out_dtype)

    return Pointwise.create(device=x_q.get_device_or_error(), dtype=out_dtype, inner_fn=inner, ranges=size)
