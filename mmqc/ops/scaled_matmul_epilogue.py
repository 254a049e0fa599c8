"""A quantized linear with what stands behind it: a term of low rank, the activation, the gate, the next quantization.

    z_i = scaled_matmul(x_q, w_q[i], s_x, s_w[i], b[i])        i = 0, or 0 (gate) and 1 (up)
    z_0 = z_0 + x_S W_Sᵀ                                       one linear, the channels that MQuant keeps (arXiv:2502.00425, 4.3)
    h   = f(z_0),  or  f(z_0) ∘ z_1                            f: relu, silu, gelu (three forms), or nothing
    y   = h,  or  quantize(h, s_next)                          s_next[0], or s_next[1] where ``next_visual``

Shapes:  x_q, w_q, s_w, b, visual: scaled_matmul.py, one or two of each of w_q, s_w, b, all w_q of one shape
         x_S [..., r], W_S [N, r], z and h [..., N] in ``out_dtype``   s_next [1] or [2] = (text, visual)   y like h, or int8
Exact:   z and h are rounded to ``out_dtype``, as in the unfused model.  A kernel computes f in float32 and rounds once;
         "quick_gelu" is three operations, each of which a model in half precision rounds.  So is the sum of z and the term of low
         rank: three roundings, in a kernel one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops import quantize, scaled_matmuls
from mmqc.ops.define import define

QUICK = 1.702  # x sigmoid(1.702 x), arXiv:1606.08415 section 2


def quick_gelu(x: Tensor) -> Tensor:
    """As transformers' QuickGELU."""
    return x * torch.sigmoid(QUICK * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def check(w_q: list[Tensor], activation: str, low_x: Tensor | None = None, low_w: Tensor | None = None) -> None:
    """Raise unless there are one or two weights of one shape, the activation is known, and the term of low rank fits."""
    if len(w_q) not in (1, 2) or w_q[0].shape != w_q[-1].shape:
        raise ValueError(f"one weight, or gate and up of one shape, not {[list(w.shape) for w in w_q]}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r}: one of {sorted(ACTIVATIONS)}")
    if (low_x is None) != (low_w is None) or (low_w is not None and len(w_q) > 1):
        raise ValueError("a term of low rank has two factors, and is one linear's")
    if low_x is not None and low_w is not None and low_w.shape != (w_q[0].shape[0], low_x.shape[-1]):
        raise ValueError(f"the factors x_S {list(low_x.shape)} and W_S {list(low_w.shape)} do not fit")


def activated(z: list[Tensor], activation: str, low_x: Tensor | None = None, low_w: Tensor | None = None) -> Tensor:
    """H of the linears' results, one operation after the other."""
    if low_x is not None and low_w is not None:
        z = [z[0] + F.linear(low_x, low_w)]
    h = ACTIVATIONS[activation](z[0])
    return h * z[1] if len(z) == 2 else h


def after(
    z: list[Tensor],
    activation: str,
    scale: Tensor | None,
    visual: Tensor | None,
    bits: int,
    low_x: Tensor | None = None,
    low_w: Tensor | None = None,
) -> Tensor:
    """What stands behind the linears."""
    h = activated(z, activation, low_x, low_w)
    return h if scale is None else quantize.contiguous_reference(h, scale, visual, bits)


def reference(
    x_q: Tensor,
    w_q: list[Tensor],
    x_scale: Tensor,
    w_scale: list[Tensor],
    bias: list[Tensor | None],
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    activation: str,
    next_scale: Tensor | None = None,
    next_visual: Tensor | None = None,
    next_bits: int = 8,
    low_x: Tensor | None = None,
    low_w: Tensor | None = None,
) -> Tensor:
    """The parts, each rounded."""
    check(w_q, activation, low_x, low_w)
    z = scaled_matmuls.reference(x_q, w_q, x_scale, w_scale, bias, visual, weight_bits, out_dtype)
    return after(z, activation, next_scale, next_visual, next_bits, low_x, low_w)


def fake(
    x_q: Tensor,
    w_q: list[Tensor],
    x_scale: Tensor,
    w_scale: list[Tensor],
    bias: list[Tensor | None],
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    activation: str,
    next_scale: Tensor | None = None,
    next_visual: Tensor | None = None,
    next_bits: int = 8,
    low_x: Tensor | None = None,
    low_w: Tensor | None = None,
) -> Tensor:
    """[..., N] in out_dtype or int8."""
    check(w_q, activation, low_x, low_w)
    z = scaled_matmuls.fake(x_q, w_q, x_scale, w_scale, bias, visual, weight_bits, out_dtype)[0]
    return z if next_scale is None else quantize.fake(z, next_scale, next_visual, next_bits)


define(
    "scaled_matmul_epilogue(Tensor x_q, Tensor[] w_q, Tensor x_scale, Tensor[] w_scale, Tensor?[] bias, Tensor? visual, "
    "int weight_bits, ScalarType out_dtype, str activation, Tensor? next_scale=None, Tensor? next_visual=None, "
    "int next_bits=8, Tensor? low_x=None, Tensor? low_w=None) -> Tensor",
    reference,
    fake,
)
