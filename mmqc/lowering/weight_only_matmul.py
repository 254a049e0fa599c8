"""weight_only_matmul as a pointwise dequantization and a float matmul.

    y = x Wᵀ + b        W[n, k] = w_q[n, k] s[n]   or   w_q[n, k] s[n, k // g]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mmqc.lowering.inductor import Pointwise, TensorBox, lowerings, ops, register_lowering
from mmqc.lowering.pack import unpack

aten = torch.ops.aten


def dequantize(codes: TensorBox, scale: TensorBox, group_size: int, dtype: torch.dtype) -> TensorBox:
    """Int8 codes [N, K] -> [N, K] in ``dtype``, by way of float32 at least."""
    rows, width = codes.get_size()
    wide = torch.promote_types(dtype, torch.float32)
    if group_size:
        groups = scale.get_size()[1]
        spread = lowerings[aten.expand.default](lowerings[aten.unsqueeze.default](scale, 2), [rows, groups, group_size])
        spread = lowerings[aten.view.default](spread, [rows, groups * group_size])
        load_scale = lowerings[aten.slice.Tensor](spread, 1, 0, width).make_loader()
    else:
        load_scale = lowerings[aten.expand.default](lowerings[aten.unsqueeze.default](scale, 1), [rows, width]).make_loader()
    load = codes.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        value = ops.mul(ops.to_dtype(load(index), wide), ops.to_dtype(load_scale(index), wide))
        return ops.to_dtype(value, dtype)

    return Pointwise.create(device=codes.get_device(), dtype=dtype, inner_fn=inner, ranges=[rows, width])


@register_lowering(torch.ops.mmqc.weight_only_matmul.default, type_promotion_kind=None)
def lower_weight_only_matmul(
    x: TensorBox, w_q: TensorBox, w_scale: TensorBox, bias: TensorBox | None, weight_bits: int, group_size: int
) -> TensorBox:
    """Dequantize in front of ``mm``; the bias fuses with what follows."""
    *rows, k = x.get_size()
    dtype = x.get_dtype()
    w = dequantize(unpack(w_q, int(k), weight_bits), w_scale, group_size, dtype)
    flat = lowerings[aten.view.default](x, [math.prod(rows), k])
    y = lowerings[aten.mm.default](flat, lowerings[aten.permute.default](w, [1, 0]))
    y = lowerings[aten.view.default](y, [*rows, w_q.get_size()[0]])
    if bias is None:
        return y
    bias = lowerings[torch.ops.prims.convert_element_type.default](bias, dtype)
    return lowerings[aten.add.Tensor](y, bias)
