"""A linear whose weight alone is quantized.

    y = x Wᵀ + b        W[n, k] = w_q[n, k] s[n]   or   w_q[n, k] s[n, k // g]

Shapes:  x [..., K]   w_q int8 [N, K] or, 2 to 4 bits, uint8 [N, packed_width] (pack.py)   s [N] or, g > 0, [N, ceil(K/g)]
         b [N]   y [..., N]
Exact:   the weight is dequantized in float32 (float64 for float64 inputs), rounded to x's dtype and multiplied there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops.define import define
from mmqc.ops.pack import check_packed, unpack


def dequantize(
    w_q: Tensor, w_scale: Tensor, width: int, weight_bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Stored weight -> [N, width] in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    codes, scale = unpack(w_q, width, weight_bits).to(wide), w_scale.to(wide)
    if group_size:
        scale = scale.repeat_interleave(group_size, dim=1)[:, :width]
    else:
        scale = scale.unsqueeze(1)
    return (codes * scale).to(dtype)


def check(x: Tensor, w_q: Tensor, w_scale: Tensor, weight_bits: int, group_size: int) -> None:
    """Raise unless the operands fit each other."""
    width = x.shape[-1]
    check_packed(w_q, width, weight_bits)
    want = [w_q.shape[0], -(-width // group_size)] if group_size else [w_q.shape[0]]
    if list(w_scale.shape) != want:
        raise ValueError(f"w_scale for group_size {group_size} has shape {want}, not {list(w_scale.shape)}")


def reference(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int
) -> Tensor:
    """Dequantize, then ``linear``."""
    check(x, w_q, w_scale, weight_bits, group_size)
    w = dequantize(w_q, w_scale, x.shape[-1], weight_bits, group_size, x.dtype)
    return F.linear(x, w, None if bias is None else bias.to(x.dtype))


def fake(x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int) -> Tensor:
    """[..., N] in x's dtype."""
    del bias
    check(x, w_q, w_scale, weight_bits, group_size)
    return x.new_empty((*x.shape[:-1], w_q.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, w_q, w_scale, _, ctx.weight_bits, ctx.group_size = inputs
    ctx.width = x.shape[-1]
    ctx.save_for_backward(w_q, w_scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    w_q, w_scale = ctx.saved_tensors
    w = dequantize(w_q, w_scale, ctx.width, ctx.weight_bits, ctx.group_size, grad.dtype)
    bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
    return grad @ w, None, None, bias, None, None


define(
    "weight_only_matmul(Tensor x, Tensor w_q, Tensor w_scale, Tensor? bias, int weight_bits, int group_size) -> Tensor",
    reference,
    fake,
)
# Inference graphs compiled outside no_grad are traced with their backward: a missing formula would refuse them.
torch.library.register_autograd("mmqc::weight_only_matmul", _backward, setup_context=_keep)
