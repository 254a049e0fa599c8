"""Several weight-only linears of one input (q, k and v; gate and up), which one kernel can compute.

    y_i = weight_only_matmul(x, w_q[i], s[i], b[i])        for every i

Shapes:  those of weight_only_matmul.py, a list of each of w_q, s, b and y
"""

from __future__ import annotations

from torch import Tensor

from mmqc.ops import weight_only_matmul
from mmqc.ops.define import define


def reference(
    x: Tensor, w_q: list[Tensor], w_scale: list[Tensor], bias: list[Tensor | None], weight_bits: int, group_size: int
) -> list[Tensor]:
    """One after the other."""
    return [weight_only_matmul.reference(x, w, s, b, weight_bits, group_size) for w, s, b in zip(w_q, w_scale, bias, strict=True)]


def fake(
    x: Tensor, w_q: list[Tensor], w_scale: list[Tensor], bias: list[Tensor | None], weight_bits: int, group_size: int
) -> list[Tensor]:
    """A list of [..., N_i] in x's dtype."""
    return [weight_only_matmul.fake(x, w, s, b, weight_bits, group_size) for w, s, b in zip(w_q, w_scale, bias, strict=True)]


define(
    "weight_only_matmuls(Tensor x, Tensor[] w_q, Tensor[] w_scale, Tensor?[] bias, int weight_bits, int group_size) -> Tensor[]",
    reference,
    fake,
)
