"""The gradient of a linear whose inputs are rounded: that of the float linear whose weight its codes stand for.

    y, unchanged        dL/dx = dL/dy W        W[:, part p] = s_p ∘ w_p, its columns where ``order`` has them

Shapes:  x [..., K], what was rounded, in float   y [..., N]   w_q one int8, float8 or packed uint8 [N, ·] a part (pack.py)
         w_scale float [N] or, g > 0, [N, ceil(K/g)], one a part   order int64 [K], the channels part after part, or none
Why:     rounding has the gradient 0 almost everywhere; it is passed on as if it were 1 (arXiv:1308.3432), clipped values too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.weight_only_matmul import dequantize


def check(x: Tensor, y: Tensor, w_q: Sequence[Tensor], w_scale: Sequence[Tensor], widths: Sequence[int]) -> None:
    """Raise unless the operands fit each other."""
    if not len(w_q) == len(w_scale) == len(widths) or sum(widths) != x.shape[-1]:
        raise ValueError(
            f"{len(w_q)} weights, {len(w_scale)} scales and widths {list(widths)} are no parts of {x.shape[-1]} channels"
        )
    if list(y.shape) != [*x.shape[:-1], w_q[0].shape[0]]:
        raise ValueError(f"y has shape {[*x.shape[:-1], w_q[0].shape[0]]}, not {list(y.shape)}")


def reference(
    x: Tensor,
    y: Tensor,
    w_q: Sequence[Tensor],
    w_scale: Sequence[Tensor],
    widths: Sequence[int],
    weight_bits: Sequence[int],
    group_size: int,
    order: Tensor | None,
) -> Tensor:
    """A copy of y."""
    del weight_bits, group_size, order
    check(x, y, w_q, w_scale, widths)
    return y.clone()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, _, w_q, w_scale, ctx.widths, ctx.bits, ctx.group_size, order = inputs
    ctx.parts = len(w_q)
    ctx.save_for_backward(*w_q, *w_scale, order)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *saved, order = ctx.saved_tensors
    parts = zip(saved[: ctx.parts], saved[ctx.parts :], ctx.widths, ctx.bits, strict=True)
    w = torch.cat([dequantize(q, s, width, bits, ctx.group_size, grad.dtype) for q, s, width, bits in parts], 1)
    x = grad @ w
    if order is not None:
        x = torch.zeros_like(x).index_copy(-1, order, x)
    none = [None] * ctx.parts
    return x, None, none, none, None, None, None, None


define(
    "straight_through(Tensor x, Tensor y, Tensor[] w_q, Tensor[] w_scale, int[] widths, int[] weight_bits, int group_size, "
    "Tensor? order) -> Tensor",
    reference,
    lambda x, y, *rest: torch.empty_like(y),
)
torch.library.register_autograd("mmqc::straight_through", _backward, setup_context=_keep)


def linear(
    x: Tensor,
    y: Tensor,
    w_q: Sequence[Tensor],
    w_scale: Sequence[Tensor],
    widths: Sequence[int],
    weight_bits: Sequence[int],
    group_size: int = 0,
    order: Tensor | None = None,
) -> Tensor:
    """y, with the op behind it where somebody wants x's gradient; graphs for inference are what they were."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y
    return torch.ops.mmqc.straight_through(
        x, y.detach(), list(w_q), list(w_scale), list(widths), list(weight_bits), group_size, order
    )


def gradient_of(y: Tensor, z: Tensor) -> Tensor:
    """The value of y, which has no gradient of its own, with the gradient of z, which it rounds."""
    return y.detach() + (z - z.detach())
