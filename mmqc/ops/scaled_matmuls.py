"""Several quantized linears of one quantized input (q, k and v; gate and up), which one kernel can compute.

    y_i = scaled_matmul(x_q, w_q[i], s_x, s_w[i], b[i], t[i])        for every i

Shapes:  those of scaled_matmul.py, a list of each of w_q, s_w, b, t and y; t is None without integer group scales
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops import scaled_matmul
from mmqc.ops.define import define


def reference(
    x_q: Tensor,
    w_q: list[Tensor],
    x_scale: Tensor,
    w_scale: list[Tensor],
    bias: list[Tensor | None],
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: list[Tensor] | None = None,
    group_size: int = 0,
) -> list[Tensor]:
    """One after the other."""
    return [
        scaled_matmul.reference(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype, t, group_size)
        for w, s, b, t in zip(w_q, w_scale, bias, group_scale or [None] * len(w_q), strict=True)
    ]


def fake(
    x_q: Tensor,
    w_q: list[Tensor],
    x_scale: Tensor,
    w_scale: list[Tensor],
    bias: list[Tensor | None],
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: list[Tensor] | None = None,
    group_size: int = 0,
) -> list[Tensor]:
    """A list of [..., N_i] in out_dtype."""
    return [
        scaled_matmul.fake(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype, t, group_size)
        for w, s, b, t in zip(w_q, w_scale, bias, group_scale or [None] * len(w_q), strict=True)
    ]


define(
    "scaled_matmuls(Tensor x_q, Tensor[] w_q, Tensor x_scale, Tensor[] w_scale, Tensor?[] bias, Tensor? visual, "
    "int weight_bits, ScalarType out_dtype, Tensor[]? group_scale=None, int group_size=0) -> Tensor[]",
    reference,
    fake,
)
