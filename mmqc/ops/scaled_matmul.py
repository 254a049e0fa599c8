"""The quantized linear: integer product, then one affine epilogue.

    y[m, n] = (sum_k x_q[m, k] w_q[n, k]) s_x(m) s_w[n] + b[n]        s_x(m) = s_x[0], or s_x[1] where ``visual``

Shapes:  x_q int8 [..., K]   w_q int8 [N, K] or, 4 bits, uint8 [N, ceil(K/2)] (pack.py)   s_x [1] or [2]   s_w [N]
         b [N]   visual bool, broadcastable to [...]   y [..., N] in ``out_dtype``
Exact:   the sum is int32 and exact; the epilogue is in float32 (float64 for a float64 result), in the order written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.integer_matmul import int_matmul
from mmqc.ops.pack import check_packed, unpack
from mmqc.ops.quantize import check_scale, row_scale


def check(x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, visual: Tensor | None, weight_bits: int) -> None:
    """Raise unless the operands fit each other."""
    if weight_bits not in (4, 8):
        raise ValueError(f"weight_bits = {weight_bits}: with quantized inputs a weight is stored in 4 or 8 bits")
    check_packed(w_q, x_q.shape[-1], weight_bits)
    check_scale(x_scale, visual)
    if x_q.dtype != torch.int8:
        raise ValueError(f"x_q is int8, not {x_q.dtype}")
    if w_scale.shape != (w_q.shape[0],):
        raise ValueError(f"w_scale has one entry per output, [{w_q.shape[0]}], not {list(w_scale.shape)}")


def reference(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, visual: Tensor | None,
    weight_bits: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Integer product and epilogue, as in the formula."""
    check(x_q, w_q, x_scale, w_scale, visual, weight_bits)
    return multiply(x_q, w_q, row_scale(x_scale, visual), w_scale, bias, weight_bits, out_dtype)


def multiply(
    x_q: Tensor, w_q: Tensor, row_scale: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The formula with the scale of every row, [1] or [..., 1]."""
    width = x_q.shape[-1]
    acc = int_matmul(x_q.reshape(-1, width), unpack(w_q, width, weight_bits))
    dtype = torch.promote_types(out_dtype, torch.float32)
    y = acc.reshape(*x_q.shape[:-1], w_q.shape[0]).to(dtype)
    y = y * row_scale.to(dtype) * w_scale.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(out_dtype)


def fake(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, visual: Tensor | None,
    weight_bits: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[..., N] in out_dtype."""
    del bias
    check(x_q, w_q, x_scale, w_scale, visual, weight_bits)
    return x_q.new_empty((*x_q.shape[:-1], w_q.shape[0]), dtype=out_dtype)


define(
    "scaled_matmul(Tensor x_q, Tensor w_q, Tensor x_scale, Tensor w_scale, Tensor? bias, Tensor? visual, "
    "int weight_bits, ScalarType out_dtype) -> Tensor",
    reference,
    fake,
)
