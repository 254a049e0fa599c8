"""A quantized linear with what stands behind it: the activation, the gate, and the quantization that the next linear reads.

    z_i = scaled_matmul(x_q, w_q[i], s_x, s_w[i], b[i])        i = 0, or 0 (gate) and 1 (up)
    h   = f(z_0),  or  f(z_0) ∘ z_1                            f: relu, silu, gelu (three forms), or nothing
    y   = h,  or  quantize(h, s_next)                          s_next[0], or s_next[1] where ``next_visual``

Shapes:  x_q, w_q, s_w, b, visual: scaled_matmul.py, one or two of each of w_q, s_w, b, all w_q of one shape
         z, h [..., N] in ``out_dtype``   s_next [1] or [2] = (text, visual)   y like h, or int8
Exact:   z and h are rounded to ``out_dtype``, as in the unfused model.  A kernel computes f in float32 and rounds once;
         "quick_gelu" is three operations, each of which a model in half precision rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops import quantize, scaled_matmul
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


def check(w_q: list[Tensor], activation: str) -> None:
    """Raise unless there are one or two weights of one shape and the activation is known."""
    if len(w_q) not in (1, 2) or w_q[0].shape != w_q[-1].shape:
        raise ValueError(f"one weight, or gate and up of one shape, not {[list(w.shape) for w in w_q]}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r}: one of {sorted(ACTIVATIONS)}")


def after(z: list[Tensor], activation: str, scale: Tensor | None, visual: Tensor | None, bits: int) -> Tensor:
    """What stands behind the linears, one operation after the other."""
    h = ACTIVATIONS[activation](z[0])
    h = h * z[1] if len(z) == 2 else h
    return h if scale is None else quantize.contiguous_reference(h, scale, visual, bits)


def reference(
    x_q: Tensor, w_q: list[Tensor], x_scale: Tensor, w_scale: list[Tensor], bias: list[Tensor | None],
    visual: Tensor | None, weight_bits: int, out_dtype: torch.dtype, activation: str, next_scale: Tensor | None = None,
    next_visual: Tensor | None = None, next_bits: int = 8,
) -> Tensor:  # fmt: skip
    """The parts, each rounded."""
    check(w_q, activation)
    z = [
        scaled_matmul.reference(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype)
        for w, s, b in zip(w_q, w_scale, bias, strict=True)
    ]
    return after(z, activation, next_scale, next_visual, next_bits)


def fake(
    x_q: Tensor, w_q: list[Tensor], x_scale: Tensor, w_scale: list[Tensor], bias: list[Tensor | None],
    visual: Tensor | None, weight_bits: int, out_dtype: torch.dtype, activation: str, next_scale: Tensor | None = None,
    next_visual: Tensor | None = None, next_bits: int = 8,
) -> Tensor:  # fmt: skip
    """[..., N] in out_dtype or int8."""
    check(w_q, activation)
    z = [
        scaled_matmul.fake(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype)
        for w, s, b in zip(w_q, w_scale, bias, strict=True)
    ]
    return z[0] if next_scale is None else quantize.fake(z[0], next_scale, next_visual, next_bits)


define(
    "scaled_matmul_epilogue(Tensor x_q, Tensor[] w_q, Tensor x_scale, Tensor[] w_scale, Tensor?[] bias, Tensor? visual, "
    "int weight_bits, ScalarType out_dtype, str activation, Tensor? next_scale=None, Tensor? next_visual=None, "
    "int next_bits=8) -> Tensor",
    reference,
    fake,
)
