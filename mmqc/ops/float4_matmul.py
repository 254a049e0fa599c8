"""A linear whose weight alone is quantized, to floats of 4 bits.

    y = x Wᵀ + b        mxfp4  W[n, k] = e2m1[n, k] 2^(s[n, k // 32] - 127)        nvfp4  W[n, k] = e2m1[n, k] s[n, k // 16] / d

Shapes:  x [..., K]   w_q uint8 [N, ceil(K/2)]   s uint8 [N, ceil(K/B)], the bytes of the scales (float4.py)
         d float32 [1] of nvfp4, none of mxfp4   b [N]   y [..., N]
Exact:   the weight is dequantized in float32 (float64 for float64 inputs), rounded to x's dtype and multiplied there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops.define import define
from mmqc.ops.float4 import check_form, half_steps, unpack_float4
from mmqc.ops.pack import packed_width
from mmqc.specs import BLOCKS


def dequantize(w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, width: int, form: str, dtype: torch.dtype) -> Tensor:
    """Stored weight -> [N, width] in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    steps = half_steps(w_scale, form, divisor).to(wide).repeat_interleave(BLOCKS[form], dim=1)[:, :width]
    return (unpack_float4(w_q, width).to(wide) * steps).to(dtype)


def check(x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, form: str) -> None:
    """Raise unless the operands fit each other."""
    check_form(form)
    n, width = w_q.shape[0], x.shape[-1]
    for name, part, columns in (("w_q", w_q, packed_width(width, 4)), ("w_scale", w_scale, -(-width // BLOCKS[form]))):
        if part.dtype != torch.uint8 or list(part.shape) != [n, columns]:
            want = f"torch.uint8 [N, {columns}]"
            raise ValueError(f"{name} of {form} for inputs of width {width} is {want}, not {part.dtype} {list(part.shape)}")
    if (divisor is None) != (form == "mxfp4"):
        raise ValueError("nvfp4 has a divisor for the tensor, mxfp4 has none")
    if divisor is not None and (divisor.shape != (1,) or divisor.dtype != torch.float32):
        raise ValueError(f"divisor is torch.float32 [1], not {divisor.dtype} {list(divisor.shape)}")


def reference(x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str) -> Tensor:
    """Dequantize, then ``linear``."""
    check(x, w_q, w_scale, divisor, form)
    w = dequantize(w_q, w_scale, divisor, x.shape[-1], form, x.dtype)
    return F.linear(x, w, None if bias is None else bias.to(x.dtype))


def fake(x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str) -> Tensor:
    """[..., N] in x's dtype."""
    del bias
    check(x, w_q, w_scale, divisor, form)
    return x.new_empty((*x.shape[:-1], w_q.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, w_q, w_scale, divisor, _, ctx.form = inputs
    ctx.width = x.shape[-1]
    ctx.save_for_backward(w_q, w_scale, divisor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    w_q, w_scale, divisor = ctx.saved_tensors
    w = dequantize(w_q, w_scale, divisor, ctx.width, ctx.form, grad.dtype)
    bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
    return grad @ w, None, None, None, bias, None


define("float4_matmul(Tensor x, Tensor w_q, Tensor w_scale, Tensor? divisor, Tensor? bias, str form) -> Tensor", reference, fake)
# As of weight_only_matmul: graphs compiled outside no_grad are traced with their backward.
torch.library.register_autograd("mmqc::float4_matmul", _backward, setup_context=_keep)
