"""A linear whose weight alone is quantized.

    y = x Wᵀ + b        W[n, k] = (w_q[n, k] - z[n]) s[n]   or   (w_q[n, k] - z[n, k // g]) s[n, k // g]

Shapes:  x [..., K]   w_q int8 [N, K] or, 2 to 4 bits, uint8 [N, packed_width] (pack.py)   s [N] or, g > 0, [N, ceil(K/g)]
         z int8 like s, float16 where zero lies between the codes, or None for 0   b [N]   y [..., N]
Exact:   the weight is dequantized in float32 (float64 for float64 inputs), rounded to x's dtype and multiplied there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops.define import define
from mmqc.ops.pack import check_packed, unpack

ZEROS = (torch.int8, torch.float16)  # dtypes of zero points


def dequantize(
    w_q: Tensor, w_scale: Tensor, width: int, weight_bits: int, group_size: int, dtype: torch.dtype, w_zero: Tensor | None = None
) -> Tensor:
    """Stored weight -> [N, width] in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    codes = unpack(w_q, width, weight_bits).to(wide)

    def by_channel(part: Tensor) -> Tensor:
        part = part.to(wide)
        return part.repeat_interleave(group_size, dim=1)[:, :width] if group_size else part.unsqueeze(1)

    if w_zero is not None:
        codes = codes - by_channel(w_zero)
    return (codes * by_channel(w_scale)).to(dtype)


def check(x: Tensor, w_q: Tensor, w_scale: Tensor, weight_bits: int, group_size: int, w_zero: Tensor | None = None) -> None:
    """Raise unless the operands fit each other."""
    width = x.shape[-1]
    check_packed(w_q, width, weight_bits)
    want = [w_q.shape[0], -(-width // group_size)] if group_size else [w_q.shape[0]]
    if list(w_scale.shape) != want:
        raise ValueError(f"w_scale for group_size {group_size} has shape {want}, not {list(w_scale.shape)}")
    if w_zero is not None and (w_zero.shape != w_scale.shape or w_zero.dtype not in ZEROS):
        raise ValueError(f"w_zero is int8 or float16 {want}, not {w_zero.dtype} {list(w_zero.shape)}")


def reference(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int, w_zero: Tensor | None = None
) -> Tensor:
    """Dequantize, then ``linear``."""
    check(x, w_q, w_scale, weight_bits, group_size, w_zero)
    w = dequantize(w_q, w_scale, x.shape[-1], weight_bits, group_size, x.dtype, w_zero)
    return F.linear(x, w, None if bias is None else bias.to(x.dtype))


def fake(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int, w_zero: Tensor | None = None
) -> Tensor:
    """[..., N] in x's dtype."""
    del bias
    check(x, w_q, w_scale, weight_bits, group_size, w_zero)
    return x.new_empty((*x.shape[:-1], w_q.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, w_q, w_scale, _, ctx.weight_bits, ctx.group_size, w_zero = inputs
    ctx.width = x.shape[-1]
    ctx.save_for_backward(w_q, w_scale, w_zero)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    w_q, w_scale, w_zero = ctx.saved_tensors
    w = dequantize(w_q, w_scale, ctx.width, ctx.weight_bits, ctx.group_size, grad.dtype, w_zero)
    bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
    return grad @ w, None, None, bias, None, None, None


define(
    "weight_only_matmul(Tensor x, Tensor w_q, Tensor w_scale, Tensor? bias, int weight_bits, int group_size, "
    "Tensor? w_zero=None) -> Tensor",
    reference,
    fake,
)
# Inference graphs compiled outside no_grad are traced with their backward: a missing formula would refuse them.
torch.library.register_autograd("mmqc::weight_only_matmul", _backward, setup_context=_keep)
