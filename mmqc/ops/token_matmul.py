"""A linear of quantized weights whose inputs are quantized as they come: symmetric, one scale per token.

    y[m, n] = s_m sum_k q[m, k] W[n, k] + b[n]        W[n, k] = w_q[n, k] s_w[n]   or   w_q[n, k] s_w[n, k // g]
    s_m = max_k |x[m, k]| / t     q = round(x / s_m), t = 127     or, with ``code`` float8_e4m3fn, q = float8(x / s_m), t = 448

Shapes:  x [..., K]   w_q int8 or float8_e4m3fn [N, K] or, 4 bits, uint8 [N, ceil(K/2)] (pack.py)
         s_w [N] or, g > 0, [N, ceil(K/g)]   b [N]   y [..., N] in x's dtype
Error:   |x - s q| <= s / 2 for integers, |x| / 16 for float8; a token of zeros has none.
Exact:   integer sums are int32 and exact, of a group as of a row, and so are sums of float8 products in float64; all else, groups
         added in their order among it, is in float32 (float64 for a float64 x).
Why:     vLLM computes this one (``dynamic_scaled_int8_quant``, ``QuantFP8`` per token), so that a model is judged as it will run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.divide import divided
from mmqc.ops.pack import FLOAT8, check_packed, unpack
from mmqc.ops.quantize import LARGEST, code_dtype, codes
from mmqc.ops.scaled_matmul import check_weight_scales, multiply

LEAST = 1e-12  # a token's scale, so that zeros are divided by something


def check(
    x: Tensor, w_q: Tensor, w_scale: Tensor, weight_bits: int, group_size: int, code: torch.dtype | None = None
) -> torch.dtype:
    """The dtype of the inputs' codes; raises unless the operands fit each other."""
    if weight_bits not in (4, 8):
        raise ValueError(f"weight_bits = {weight_bits}: with quantized inputs a weight is stored in 4 or 8 bits")
    check_packed(w_q, x.shape[-1], weight_bits)
    dtype = code_dtype(8, code)
    if w_q.dtype == FLOAT8 and dtype != FLOAT8:
        raise ValueError("float8 weights are multiplied with float8 inputs, not int8 ones")
    check_weight_scales(w_scale, None, w_q.shape[0], x.shape[-1], group_size)
    return dtype


def token_scales(x: Tensor, code: torch.dtype) -> Tensor:
    """s_m [..., 1] of x [..., K], float32 or float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return divided(wide.abs().amax(-1, keepdim=True), LARGEST if code == FLOAT8 else 127).clamp_min(LEAST)


def reference(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    weight_bits: int,
    group_size: int,
    code: torch.dtype | None = None,
) -> Tensor:
    """Quantize every token, multiply, scale."""
    dtype = check(x, w_q, w_scale, weight_bits, group_size, code)
    scale = token_scales(x, dtype)
    x_q = codes(x, scale, 8, dtype)
    if dtype == torch.int8 or (not group_size and w_q.dtype in (torch.uint8, FLOAT8)):
        return multiply(x_q, w_q, scale, w_scale, bias, weight_bits, x.dtype, None, group_size)
    y = _sum_groups(x_q, unpack(w_q, x.shape[-1], weight_bits), w_scale.to(scale.dtype), group_size) * scale
    return (y if bias is None else y + bias.to(scale.dtype)).to(x.dtype)


def _sum_groups(x_q: Tensor, w: Tensor, w_scale: Tensor, group_size: int) -> Tensor:
    """sum_j (x_j w_jT) s[:, j] of float8 inputs [..., K] and codes [N, K]; one group, where there are none."""
    parts = group_size or w.shape[1]
    scales = w_scale if group_size else w_scale[:, None]
    total = scales.new_zeros(*x_q.shape[:-1], w.shape[0])
    for j, (x_j, w_j) in enumerate(zip(x_q.double().split(parts, -1), w.double().split(parts, 1), strict=True)):
        total += (x_j @ w_j.T).to(total.dtype) * scales[:, j]
    return total


def fake(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    weight_bits: int,
    group_size: int,
    code: torch.dtype | None = None,
) -> Tensor:
    """[..., N] in x's dtype."""
    del bias
    check(x, w_q, w_scale, weight_bits, group_size, code)
    return x.new_empty((*x.shape[:-1], w_q.shape[0]))


define(
    "token_matmul(Tensor x, Tensor w_q, Tensor w_scale, Tensor? bias, int weight_bits, int group_size, "
    "ScalarType? code=None) -> Tensor",
    reference,
    fake,
)
