"""weight_only_matmul: on CUDA the Triton kernel; on the CPU, for few rows, few_rows.py; else a pointwise dequantization and mm.

    y = x Wᵀ + b        W[n, k] = (w_q[n, k] - z[n]) s[n]   or   (w_q[n, k] - z[n, k // g]) s[n, k // g]

Shapes:  those of ops/weight_only_matmul.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mmqc.lowering import few_rows
from mmqc.lowering.inductor import Pointwise, TensorBox, convert, lowerings, ops, register_lowering, static_int
from mmqc.lowering.pack import unpack
from mmqc.lowering.scaled_matmul import NO_CUDA, on_cuda, takes_kernel, traced_operands, why_no_kernel

aten = torch.ops.aten

ZERO_POINTS = "few rows with zero points: the weight is dequantized into memory"


def why_not(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel (on the CPU: the one pass of few_rows.py) cannot take this node of an ATen graph."""
    reason = why_no_kernel(node)
    if reason is not NO_CUDA:
        return reason
    x, _, _, _, bits, group, *zero = traced_operands(node)
    if x.device.type != "cpu":
        return None
    if any(z is not None for z in zero):
        return ZERO_POINTS if few_rows.is_few(math.prod(x.shape[:-1])) else None
    return few_rows.why_not(math.prod(x.shape[:-1]), x.shape[-1], bits, group)


def dequantize(codes: TensorBox, scale: TensorBox, group_size: int, dtype: torch.dtype, zero: TensorBox | None = None) -> TensorBox:
    """Int8 codes [N, K] -> [N, K] in ``dtype``, by way of float32 at least.

    The groups are an axis of their own: Inductor's C++ loops over k // g are wrong where g does not divide K (torch 2.13).
    """
    rows, width = (static_int(size) for size in codes.get_size())
    groups, group = (-(-width // group_size), group_size) if group_size else (1, width)
    wide = torch.promote_types(dtype, torch.float32)
    padding = groups * group - width
    if padding:
        codes = lowerings[aten.constant_pad_nd.default](codes, [0, padding], 0)
    load, load_scale = codes.make_loader(), scale.make_loader()
    load_zero = None if zero is None else zero.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        n, g, j = index
        place = [n, g] if group_size else [n]
        q = ops.to_dtype(load([n, g * group + j]), wide)
        if load_zero is not None:
            q = ops.sub(q, ops.to_dtype(load_zero(place), wide))
        return ops.to_dtype(ops.mul(q, ops.to_dtype(load_scale(place), wide)), dtype)

    w = Pointwise.create(device=codes.get_device(), dtype=dtype, inner_fn=inner, ranges=[rows, groups, group])
    w.realize()
    w = lowerings[aten.view.default](w, [rows, groups * group])
    return lowerings[aten.slice.Tensor](w, 1, 0, width) if padding else w


@register_lowering(torch.ops.mmqc.weight_only_matmul.default, type_promotion_kind=None)
def lower_weight_only_matmul(
    x: TensorBox,
    w_q: TensorBox,
    w_scale: TensorBox,
    bias: TensorBox | None,
    weight_bits: int,
    group_size: int,
    w_zero: TensorBox | None = None,
) -> TensorBox:
    """A kernel, one pass over the stored weight, or a dequantization in front of ``mm``; what follows fuses with the bias."""
    if takes_kernel(x):
        return on_cuda().weight_only(x, [w_q], [w_scale], [bias], weight_bits, group_size, w_zero)[0]
    rows, k = list(x.get_size()[:-1]), static_int(x.get_size()[-1])
    dtype, m = x.get_dtype(), math.prod(rows)
    flat = lowerings[aten.view.default](x, [m, k])
    on_cpu = x.get_device_or_error().type == "cpu"
    if on_cpu and w_zero is None and few_rows.is_few(m) and few_rows.why_not(m, k, weight_bits, group_size) is None:
        y = few_rows.multiply(flat, w_q, w_scale, bias, weight_bits, group_size)
        return lowerings[aten.view.default](y, [*rows, w_q.get_size()[0]])
    w = dequantize(unpack(w_q, k, weight_bits), w_scale, group_size, dtype, w_zero)
    y = lowerings[aten.mm.default](flat, lowerings[aten.permute.default](w, [1, 0]))
    y = lowerings[aten.view.default](y, [*rows, w_q.get_size()[0]])
    if bias is None:
        return y
    return lowerings[aten.add.Tensor](y, convert(bias, dtype))
