"""Fake quantization: the quantized linears of ops/ computed in floating point alone, the same numbers as the integer path.

    y[m, n] = (sum_j (sum over k of group j of x_q[m, k] w_q[n, k]) s[n, j]) s_x(m) s_w[n] + b[n]

Shapes:  those of ops/scaled_matmul.py and ops/weight_only_matmul.py
Exact:   sums of products of codes are integers below 2^53, which float64 holds: the sum of a group, and with integer scales that
         of all groups, is the number that int32 holds.  What follows is the op's own float32 arithmetic in the op's order,
         so the result equals that of the op to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.pack import unpack
from mmqc.ops.quantize import row_scale
from mmqc.ops.scaled_matmul import check
from mmqc.ops.weight_only_matmul import reference as weight_only_matmul

__all__ = ["scaled_matmul", "weight_only_matmul"]


def scaled_matmul(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, visual: Tensor | None,
    weight_bits: int, out_dtype: torch.dtype, group_scale: Tensor | None = None, group_size: int = 0,
) -> Tensor:  # fmt: skip
    """``mmqc::scaled_matmul``, every product in float64."""
    check(x_q, w_q, x_scale, w_scale, visual, weight_bits, group_scale, group_size)
    width = x_q.shape[-1]
    wide = torch.promote_types(out_dtype, torch.float32)
    x, w = x_q.double(), unpack(w_q, width, weight_bits).double()
    if group_scale is not None:
        w = w * group_scale.double().repeat_interleave(group_size, 1)[:, :width]
    if group_size and group_scale is None:
        y = x.new_zeros((*x.shape[:-1], len(w)), dtype=wide)
        for j, (x_j, w_j) in enumerate(zip(x.split(group_size, -1), w.split(group_size, -1), strict=True)):
            y += (x_j @ w_j.T).to(wide) * w_scale[:, j].to(wide)
    else:
        y = (x @ w.T).to(wide)
    y = y * row_scale(x_scale, visual).to(wide)
    if w_scale.dim() == 1:
        y = y * w_scale.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(out_dtype)
