"""The quantized linear: integer product, then one affine epilogue.

    y[m, n] = (sum_k x_q[m, k] w_q[n, k]) s_x(m) s_w[n] + b[n]        s_x(m) = s_x[0], or s_x[1] where ``visual``

With a scale per g input channels, C_j[m, n] = sum of x_q w_q over the k of group j:

    float scales      y = (sum_j float(C_j) s_w[n, j]) s_x(m) + b[n]
    integer scales    y = float(sum_j C_j t[n, j]) s_x(m) s_w[n] + b[n]        t = s alpha rounded, s_w = 1 / alpha

Shapes:  x_q int8 [..., K]   w_q int8 [N, K] or, 4 bits, uint8 [N, ceil(K/2)] (pack.py)   s_x [1] or [2]
         or x_q float8_e4m3fn, and w_q float8_e4m3fn or the same 4 bits, without groups
         s_w [N], or [N, ceil(K/g)] with float group scales   t int32 or int8 [N, ceil(K/g)]   b [N]
         visual bool, broadcastable to [...]   y [..., N] in ``out_dtype``
int8 t:  a promise that |w_q t| <= 127: the sum over groups is then one int8 product of x_q and w_q t, and may be computed so.
Exact:   C_j is int32 and exact, and so is the sum of C_j t as long as it stays below 2^31, which the solver proves
         (solvers/integer_scale.py); the rest is in float32 (float64 for a float64 result), in the order written.
         A product of float8 codes is a multiple of 2^-18 below 2^18: float64 holds sums of 2^17 of them exactly, and the
         reference takes it; kernels add in float32.
Source:  integer scales are Integer Scale's (arXiv:2405.14597, equation 2 and table 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.integer_matmul import int_matmul
from mmqc.ops.pack import FLOAT8, check_packed, unpack
from mmqc.ops.quantize import check_scale, row_scale

INTEGERS = (torch.int32, torch.int8)


def check(
    x_q: Tensor,
    w_q: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    visual: Tensor | None,
    weight_bits: int,
    group_scale: Tensor | None = None,
    group_size: int = 0,
) -> None:
    """Raise unless the operands fit each other."""
    if weight_bits not in (4, 8):
        raise ValueError(f"weight_bits = {weight_bits}: with quantized inputs a weight is stored in 4 or 8 bits")
    check_packed(w_q, x_q.shape[-1], weight_bits)
    check_scale(x_scale, visual)
    if x_q.dtype not in (torch.int8, FLOAT8):
        raise ValueError(f"x_q is int8 or {FLOAT8}, not {x_q.dtype}")
    if weight_bits == 8 and w_q.dtype != x_q.dtype:
        raise ValueError(f"w_q of 8 bits is {x_q.dtype} like x_q, not {w_q.dtype}")
    if x_q.dtype == FLOAT8 and group_size:
        raise ValueError(f"group_size = {group_size}: float8 activations take weights without groups")
    check_weight_scales(w_scale, group_scale, w_q.shape[0], x_q.shape[-1], group_size)


def check_weight_scales(w_scale: Tensor, group_scale: Tensor | None, n: int, k: int, group_size: int) -> None:
    """Raise unless the scales are those of a weight [N, K] with groups of this size (0: none)."""
    if group_size < 0 or (group_scale is not None and not group_size):
        raise ValueError(f"group_size = {group_size}: 0, or the group of group scales")
    groups = [n, -(-k // group_size)] if group_size else []
    if group_scale is not None and (list(group_scale.shape) != groups or group_scale.dtype not in INTEGERS):
        raise ValueError(f"group_scale is int32 or int8 {groups}, not {group_scale.dtype} {list(group_scale.shape)}")
    if group_size and group_scale is None:
        if list(w_scale.shape) != groups:
            raise ValueError(f"w_scale for group_size {group_size} has shape {groups}, not {list(w_scale.shape)}")
    elif w_scale.shape != (n,):
        raise ValueError(f"w_scale has one entry per output, [{n}], not {list(w_scale.shape)}")


def sum_groups(x: Tensor, w: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """sum_j C_j scale[:, j] [M, N] in the dtype of ``scale`` [N, ceil(K/g)], integers in int32; x int8 [M, K], w int8 [N, K]."""
    scale = scale if scale.is_floating_point() else scale.to(torch.int32)
    acc = scale.new_zeros(x.shape[0], w.shape[0])
    for j, (x_j, w_j) in enumerate(zip(x.split(group_size, 1), w.split(group_size, 1), strict=True)):
        acc += int_matmul(x_j.contiguous(), w_j.contiguous()).to(scale.dtype) * scale[:, j]
    return acc


def reference(
    x_q: Tensor,
    w_q: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: Tensor | None = None,
    group_size: int = 0,
) -> Tensor:
    """Integer product and epilogue, as in the formula."""
    check(x_q, w_q, x_scale, w_scale, visual, weight_bits, group_scale, group_size)
    rows = row_scale(x_scale, visual)
    return multiply(x_q, w_q, rows, w_scale, bias, weight_bits, out_dtype, group_scale, group_size)


def multiply(
    x_q: Tensor,
    w_q: Tensor,
    row_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: Tensor | None = None,
    group_size: int = 0,
) -> Tensor:
    """The formula with the scale of every row, [1] or [..., 1]."""
    width = x_q.shape[-1]
    dtype = torch.promote_types(out_dtype, torch.float32)
    x, w = x_q.reshape(-1, width), unpack(w_q, width, weight_bits)
    if group_size:
        acc = sum_groups(x, w, w_scale.to(dtype) if group_scale is None else group_scale, group_size)
    else:
        acc = int_matmul(x, w) if x.dtype == torch.int8 else x.double() @ w.double().T
    y = acc.reshape(*x_q.shape[:-1], w_q.shape[0]).to(dtype) * row_scale.to(dtype)
    if w_scale.dim() == 1:
        y = y * w_scale.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(out_dtype)


def fake(
    x_q: Tensor,
    w_q: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: Tensor | None = None,
    group_size: int = 0,
) -> Tensor:
    """[..., N] in out_dtype."""
    del bias
    check(x_q, w_q, x_scale, w_scale, visual, weight_bits, group_scale, group_size)
    return x_q.new_empty((*x_q.shape[:-1], w_q.shape[0]), dtype=out_dtype)


define(
    "scaled_matmul(Tensor x_q, Tensor w_q, Tensor x_scale, Tensor w_scale, Tensor? bias, Tensor? visual, "
    "int weight_bits, ScalarType out_dtype, Tensor? group_scale=None, int group_size=0) -> Tensor",
    reference,
    fake,
)
