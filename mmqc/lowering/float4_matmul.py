"""float4_matmul: on CUDA the Triton kernel, as a call; elsewhere a pointwise dequantization in front of ``mm``.

    y = x Wᵀ + b        W[n, k] = h[n, k] t[n, k // B],    h twice e2m1's number, t half of the block's scale (ops/float4.py)

Shapes:  those of ops/float4_matmul.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from sympy import Integer
from torch import fx

from mmqc import kernels
from mmqc.lowering.inductor import (
    Pointwise,
    TensorBox,
    call_kernel,
    convert,
    for_package,
    has_kernel,
    lowerings,
    ops,
    register_lowering,
    static_int,
)
from mmqc.lowering.scaled_matmul import traced_operands
from mmqc.ops.float4 import BIAS
from mmqc.ops.pack import stretch
from mmqc.specs import BLOCKS

aten = torch.ops.aten
DEQUANTIZED = "floats of 4 bits: the weight is dequantized into memory"


def why_not(node: fx.Node) -> str | None:
    """None, or why no kernel takes this node of an ATen graph: the weight is then written out in x's dtype in every call."""
    x, *rest = traced_operands(node)
    if x.device.type != "cuda" or not kernels.install():
        return DEQUANTIZED
    from mmqc.kernels import on_cuda

    return on_cuda.why_not_float4(x, *rest)


def _half_step(stored: Any, form: str) -> Any:
    """Half of the scale that a byte stands for, but for nvfp4's divisor."""
    if form == "nvfp4":
        number = ops.to_dtype(ops.to_dtype_bitcast(stored, torch.float8_e4m3fn, torch.uint8), torch.float32)
        return ops.mul(number, ops.constant(0.5, torch.float32))
    exponent = ops.sub(ops.to_dtype(stored, torch.float32), ops.constant(float(BIAS + 1), torch.float32))
    return ops.exp2(exponent)


def _twice_e2m1(bits: Any) -> Any:
    """Four bits in int32 -> 0, 1, 2, 3, 4, 6, 8, 12 or their negatives, in int8."""
    number = lambda v: ops.constant(v, torch.int32)  # noqa: E731
    size = ops.bitwise_and(bits, number(7))
    high, odd = ops.bitwise_right_shift(size, number(1)), ops.bitwise_and(size, number(1))
    normal = ops.bitwise_left_shift(ops.add(odd, number(2)), ops.maximum(ops.sub(high, number(1)), number(0)))
    value = ops.where(ops.lt(size, number(2)), size, normal)
    return ops.to_dtype(ops.where(ops.lt(bits, number(8)), value, ops.sub(number(0), value)), torch.int8)


def dequantize(
    w_q: TensorBox, w_scale: TensorBox, divisor: TensorBox | None, width: int, form: str, dtype: torch.dtype
) -> TensorBox:
    """Stored weight -> [N, width] in ``dtype``, by way of float32 at least; stretches are an axis of their own, as in pack.py."""
    rows, length = static_int(w_q.get_size()[0]), stretch(width, 4)
    wide = torch.promote_types(dtype, torch.float32)
    load, load_scale = w_q.make_loader(), w_scale.make_loader()
    load_divisor = None if divisor is None else divisor.make_loader()
    steps_of = [rows, -(-width // BLOCKS[form])]

    def step(index: Sequence[Any]) -> Any:
        value = _half_step(load_scale(index), form)
        return value if load_divisor is None else ops.truediv(value, load_divisor([Integer(0)]))

    steps = Pointwise.create(device=w_q.get_device(), dtype=torch.float32, inner_fn=step, ranges=steps_of)
    steps.realize()

    def code(index: Sequence[Any]) -> Any:
        n, t, j = index
        word = ops.to_dtype(load([n, j]), torch.int32)
        bits = ops.bitwise_right_shift(word, ops.index_expr(4 * t, torch.int32))
        return _twice_e2m1(ops.bitwise_and(bits, ops.constant(15, torch.int32)))

    codes = Pointwise.create(device=w_q.get_device(), dtype=torch.int8, inner_fn=code, ranges=[rows, 2, length])
    codes.realize()
    codes = lowerings[aten.view.default](codes, [rows, 2 * length])
    block, groups = BLOCKS[form], steps_of[1]
    padding: Any = groups * block - 2 * length
    if padding > 0:
        codes = lowerings[aten.constant_pad_nd.default](codes, [0, padding], 0)
    elif padding < 0:
        codes = lowerings[aten.slice.Tensor](codes, 1, 0, groups * block)
    load_code, load_step = codes.make_loader(), steps.make_loader()

    def value(index: Sequence[Any]) -> Any:
        n, g, j = index
        product = ops.mul(ops.to_dtype(load_code([n, g * block + j]), wide), ops.to_dtype(load_step([n, g]), wide))
        return ops.to_dtype(product, dtype)

    w = Pointwise.create(device=w_q.get_device(), dtype=dtype, inner_fn=value, ranges=[rows, groups, block])
    w.realize()
    w = lowerings[aten.view.default](w, [rows, groups * block])
    return w if groups * block == width else lowerings[aten.slice.Tensor](w, 1, 0, width)


@register_lowering(torch.ops.mmqc.float4_matmul.default, type_promotion_kind=None)
def lower_float4_matmul(
    x: TensorBox, w_q: TensorBox, w_scale: TensorBox, divisor: TensorBox | None, bias: TensorBox | None, form: str
) -> TensorBox:
    """A call of the kernel, or a dequantization in front of ``mm``; what follows fuses with the bias."""
    if has_kernel(x) and not for_package():
        return call_kernel(torch.ops.mmqc.float4_matmul.default, x, w_q, w_scale, divisor, bias, form)
    rows, k = list(x.get_size()[:-1]), static_int(x.get_size()[-1])
    flat = lowerings[aten.view.default](x, [math.prod(rows), k])
    w = dequantize(w_q, w_scale, divisor, k, form, x.get_dtype())
    y = lowerings[aten.mm.default](flat, lowerings[aten.permute.default](w, [1, 0]))
    y = lowerings[aten.view.default](y, [*rows, w_q.get_size()[0]])
    return y if bias is None else lowerings[aten.add.Tensor](y, convert(bias, x.get_dtype()))
