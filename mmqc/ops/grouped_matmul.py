"""The linears of all experts of a mixture: each takes a stretch of the rows, which are sorted by expert.

    y[s, n] = sum_k x[s, k] W_e[n, k] + b[e, n]              e: the expert with  o[e] <= s < o[e + 1]
    y[s, n] = (sum_k x_q[s, k] w_q[e, n, k]) s_x[s] s_w[e, n] + b[e, n]        where s_x is given: integer inputs
    y[s, n] = (sum_j float(C_j[s, n]) s_w[e, n, j]) s_x[s] + b[e, n]           ... and groups: C_j the sum over group j

Shapes:  x [S, K] floating point, or x_q int8 with s_x float32 [S], one scale a row   y [S, N] in ``out_dtype``
         w_q [E, N, K] int8, or uint8 [E, N, packed_width] (pack.py)   b [E, N]
         s_w [E, N] or, g > 0, [E, N, ceil(K/g)]: W_e[n, k] = (w_q[e, n, k] - z[e, n, k // g]) s_w[e, n, k // g]
         z int8 or float16 like s_w, or None for 0; only for floating-point x
         o int32 | int64 [E + 1], ascending, o[0] = 0; rows from o[E] on belong to no expert and come out as 0
Exact:   per expert as weight_only_matmul.py (x is floating point) and scaled_matmul.py (integer) say; an expert without
         rows is not read.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from mmqc.ops import scaled_matmul, weight_only_matmul
from mmqc.ops.define import define
from mmqc.ops.pack import check_packed


def check(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    weight_bits: int,
    group_size: int,
    w_zero: Tensor | None = None,
) -> None:
    """Raise unless the operands fit each other."""
    if x.dim() != 2 or w_q.dim() != 3:
        raise ValueError(f"rows are [S, K] and stacked weights [E, N, K], not {list(x.shape)} and {list(w_q.shape)}")
    experts, outputs, width = w_q.shape[0], w_q.shape[1], x.shape[1]
    check_packed(w_q.flatten(0, 1), width, weight_bits)
    if (row_scale is None) == (x.dtype == torch.int8):
        raise ValueError(f"int8 rows come with row_scale and others without it; x is {x.dtype}")
    if row_scale is not None and weight_bits not in (4, 8):
        raise ValueError(f"weight_bits = {weight_bits}: with quantized inputs a weight is stored in 4 or 8 bits")
    if row_scale is not None and row_scale.shape != x.shape[:1]:
        raise ValueError(f"row_scale has one entry per row, [{x.shape[0]}], not {list(row_scale.shape)}")
    groups = [-(-width // group_size)] if group_size else []
    if list(w_scale.shape) != [experts, outputs, *groups]:
        raise ValueError(f"w_scale for group_size {group_size} has shape {[experts, outputs, *groups]}, not {list(w_scale.shape)}")
    if w_zero is not None and (w_zero.shape != w_scale.shape or w_zero.dtype not in weight_only_matmul.ZEROS):
        raise ValueError(f"w_zero is int8 or float16 {list(w_scale.shape)}, not {w_zero.dtype} {list(w_zero.shape)}")
    if w_zero is not None and row_scale is not None:
        raise ValueError("zero points go with floating-point rows: the integer product has no term for them")
    if offsets.shape != (experts + 1,) or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets is int32 or int64 [{experts + 1}], not {offsets.dtype} {list(offsets.shape)}")
    if bias is not None and bias.shape != (experts, outputs):
        raise ValueError(f"bias has shape [{experts}, {outputs}], not {list(bias.shape)}")


def reference(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    weight_bits: int,
    group_size: int,
    out_dtype: torch.dtype,
    w_zero: Tensor | None = None,
) -> Tensor:
    """One expert after the other, as the single linears compute it."""
    check(x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, w_zero)
    y = x.new_zeros((x.shape[0], w_q.shape[1]), dtype=out_dtype)
    bounds = offsets.tolist()
    for e, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        rows, b = x[start:end], None if bias is None else bias[e]
        if row_scale is None:
            zero = None if w_zero is None else w_zero[e]
            part = weight_only_matmul.reference(rows, w_q[e], w_scale[e], b, weight_bits, group_size, zero)
        else:
            part = scaled_matmul.multiply(
                rows, w_q[e], row_scale[start:end, None], w_scale[e], b, weight_bits, out_dtype, None, group_size
            )
        y[start:end] = part
    return y


def fake(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    weight_bits: int,
    group_size: int,
    out_dtype: torch.dtype,
    w_zero: Tensor | None = None,
) -> Tensor:
    """[S, N] in out_dtype."""
    check(x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, w_zero)
    return x.new_empty((x.shape[0], w_q.shape[1]), dtype=out_dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, w_q, w_scale, offsets, _, _, ctx.weight_bits, ctx.group_size, _, w_zero = inputs
    ctx.width = x.shape[1]
    ctx.save_for_backward(w_q, w_scale, offsets, w_zero)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    w_q, w_scale, offsets, w_zero = ctx.saved_tensors
    rows = torch.arange(grad.shape[0], device=grad.device)
    mine = (rows >= offsets[:-1, None]) & (rows < offsets[1:, None])
    each = mine.unsqueeze(-1).to(grad.dtype) * grad  # [E, S, N]
    bias = each.sum(1) if ctx.needs_input_grad[4] else None
    x = None
    if ctx.needs_input_grad[0]:
        flat = w_q.flatten(0, 1), w_scale.flatten(0, 1)
        zero = None if w_zero is None else w_zero.flatten(0, 1)
        w = weight_only_matmul.dequantize(*flat, ctx.width, ctx.weight_bits, ctx.group_size, grad.dtype, zero)
        x = torch.bmm(each, w.unflatten(0, w_q.shape[:2])).sum(0)
    return (x, None, None, None, bias, None, None, None, None, None)


define(
    "grouped_matmul(Tensor x, Tensor w_q, Tensor w_scale, Tensor offsets, Tensor? bias, Tensor? row_scale, "
    "int weight_bits, int group_size, ScalarType out_dtype, Tensor? w_zero=None) -> Tensor",
    reference,
    fake,
)
# Inference graphs compiled outside no_grad are traced with their backward: a missing formula would refuse them.
torch.library.register_autograd("mmqc::grouped_matmul", _backward, setup_context=_keep)
