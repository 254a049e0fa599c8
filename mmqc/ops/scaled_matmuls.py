"""Several quantized linears of one quantized input (q, k and v; gate and up), which one kernel can compute.

    y_i = scaled_matmul(x_q, w_q[i], s_x, s_w[i], b[i])        for every i

Shapes:  those of scaled_matmul.py, a list of each of w_q, s_w, b and y
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops import scaled_matmul
from mmqc.ops.define import define


def reference(
    x_q: Tensor, w_q: list[Tensor], x_scale: Tensor, w_scale: list[Tensor], bias: list[Tensor | None],
    visual: Tensor | None, weight_bits: int, out_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """One after the other."""
    return [
        scaled_matmul.reference(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype)
        for w, s, b in zip(w_q, w_scale, bias, strict=True)
    ]


def fake(
    x_q: Tensor, w_q: list[Tensor], x_scale: Tensor, w_scale: list[Tensor], bias: list[Tensor | None],
    visual: Tensor | None, weight_bits: int, out_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """A list of [..., N_i] in out_dtype."""
    return [
        scaled_matmul.fake(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype)
        for w, s, b in zip(w_q, w_scale, bias, strict=True)
    ]


define(
    "scaled_matmuls(Tensor x_q, Tensor[] w_q, Tensor x_scale, Tensor[] w_scale, Tensor?[] bias, Tensor? visual, "
    "int weight_bits, ScalarType out_dtype) -> Tensor[]",
    reference,
    fake,
)
