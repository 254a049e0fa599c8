"""quantize_per_token: on CUDA the kernel; elsewhere two reductions and a pointwise node a part, which fuse with what produced x.

    s = (max x - min x) / (2^b - 1)        q = round((x - min x) / s) - 2^(b-1)        o = min x + 2^(b-1) s

Shapes:  those of ops/quantize_per_token.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.lowering.hadamard import on_cuda
from mmqc.lowering.inductor import Pointwise, TensorBox, convert, has_kernel, lowerings, ops, register_lowering
from mmqc.ops.quantize_per_token import finest

aten = torch.ops.aten


def _scale(low: TensorBox, high: TensorBox, bits: int, before: TensorBox | None, least: float) -> TensorBox:
    """Least: of the step, in steps of the part ``before``."""
    load_before = None if before is None else before.make_loader()
    load_low, load_high, dtype = low.make_loader(), high.make_loader(), low.get_dtype()

    def inner(index: Sequence[Any]) -> Any:
        s = ops.truediv(ops.sub(load_high(index), load_low(index)), ops.constant(2.0**bits - 1, dtype))
        return s if load_before is None else ops.maximum(s, ops.mul(load_before(index), ops.constant(least, dtype)))

    scale = Pointwise.create(device=low.get_device(), dtype=dtype, inner_fn=inner, ranges=list(low.get_size()))
    scale.realize()  # the next part's depends on it: one number a token, read instead of reduced again
    return scale


def _codes(part: TensorBox, low: TensorBox, scale: TensorBox, bits: int) -> TensorBox:
    load, load_low, load_s = part.make_loader(), low.make_loader(), scale.make_loader()
    dtype, top = part.get_dtype(), 2.0**bits - 1

    def inner(index: Sequence[Any]) -> Any:
        row = [*index[:-1], 0]
        step = load_s(row)
        step = ops.where(ops.gt(step, ops.constant(0.0, dtype)), step, ops.constant(1.0, dtype))
        q = ops.round(ops.truediv(ops.sub(load(index), load_low(row)), step))
        q = ops.minimum(ops.maximum(q, ops.constant(0.0, dtype)), ops.constant(top, dtype))
        return ops.to_dtype(ops.sub(q, ops.constant(2.0 ** (bits - 1), dtype)), torch.int8)

    return Pointwise.create(device=part.get_device(), dtype=torch.int8, inner_fn=inner, ranges=list(part.get_size()))


@register_lowering(torch.ops.mmqc.quantize_per_token.default, type_promotion_kind=None)
def lower_quantize_per_token(
    x: TensorBox, order: TensorBox | None, widths: Sequence[int], bits: Sequence[int]
) -> tuple[TensorBox, TensorBox, TensorBox]:
    """Codes, scales and offsets."""
    if has_kernel(x):
        axis = len(x.get_size()) - 1
        ordered = x if order is None else lowerings[aten.index.Tensor](x, [*[None] * axis, order])
        if (launched := on_cuda().per_token(ordered, widths, bits)) is not None:
            return launched
    wide = convert(x, torch.promote_types(x.get_dtype(), torch.float32))
    axis = len(wide.get_size()) - 1
    if order is not None:
        wide = lowerings[aten.index.Tensor](wide, [*[None] * axis, order])
    codes, scales, offsets = [], [], []
    start = 0
    for p, (width, b) in enumerate(zip(widths, bits, strict=True)):
        part = lowerings[aten.slice.Tensor](wide, axis, start, start + width)
        start += width
        low, high = (lowerings[f](part, [axis], True) for f in (aten.amin.default, aten.amax.default))
        s = _scale(low, high, b, scales[-1] if p else None, finest(bits[p - 1], b))
        codes.append(_codes(part, low, s, b))
        scales.append(s)
        offsets.append(lowerings[aten.add.Tensor](low, lowerings[aten.mul.Tensor](s, 2.0 ** (b - 1))))
    q = codes[0] if len(codes) == 1 else lowerings[aten.cat.default](codes, axis)
    return q, _columns(scales), _columns(offsets)


def _columns(parts: Sequence[TensorBox]) -> TensorBox:
    """[..., 1] tensors side by side; Inductor's lowering of ``cat`` may ask for the node's value, and here there are three."""
    loads, first = [part.make_loader() for part in parts], parts[0]

    def inner(index: Sequence[Any]) -> Any:
        row, at = [*index[:-1], 0], ops.index_expr(index[-1], torch.int32)
        value = loads[0](row)
        for p, load in enumerate(loads[1:], 1):
            value = ops.where(ops.eq(at, ops.constant(p, torch.int32)), load(row), value)
        return value

    if len(parts) == 1:
        return first
    size = [*first.get_size()[:-1], len(parts)]
    return Pointwise.create(device=first.get_device(), dtype=first.get_dtype(), inner_fn=inner, ranges=size)
