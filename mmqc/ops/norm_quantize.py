"""A norm and the static quantization behind it: what stands in front of q, k and v, or of gate and up.

    h = x + r                                       (only with a residual r; h is a result too)
    y = h / sqrt(mean(h²) + eps) [∘ g] [+ β]        (norm.py; with ``center`` h less its mean: a LayerNorm)
    q = quantize(y, s, visual, bits, code)

Shapes:  x, r, h [..., D]   g, β [D] or none   s, visual and q as in quantize.py   h is empty ([0]) without a residual
Exact:   float32 at least, and rounded where modules round: y once, to x's dtype; with ``round_first``, as transformers' RMSNorms
         do, in front of the gain, and again behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops import quantize
from mmqc.ops.define import define


def check(x: Tensor, residual: Tensor | None, gain: Tensor | None, bias: Tensor | None) -> None:
    """Raise unless the operands fit each other."""
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual is like x, {x.dtype} {list(x.shape)}, not {residual.dtype} {list(residual.shape)}")
    for name, vector in (("gain", gain), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape [{x.shape[-1]}], not {list(vector.shape)}")


def normed(h: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, round_first: bool, center: bool = False) -> Tensor:
    """Y, as the modules compute it."""
    if center and not round_first:
        return F.layer_norm(h, h.shape[-1:], gain, bias, eps)
    if center:
        y = F.layer_norm(h, h.shape[-1:], None, None, eps)
    else:
        wide = h.to(torch.promote_types(h.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y.to(h.dtype) if round_first else y
    if gain is not None:
        y = y * gain.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(h.dtype)


def reference(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    round_first: bool,
    scale: Tensor,
    visual: Tensor | None,
    bits: int,
    code: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One after the other."""
    check(x, residual, gain, bias)
    h = x if residual is None else x + residual
    y = normed(h, gain, bias, eps, round_first, center)
    q = quantize.contiguous_reference(y, scale, visual, bits, code)
    return q, x.new_empty(0) if residual is None else h


def fake(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    round_first: bool,
    scale: Tensor,
    visual: Tensor | None,
    bits: int,
    code: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes, and x + r where there is a residual."""
    del eps, center, round_first
    check(x, residual, gain, bias)
    h = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return quantize.fake(x, scale, visual, bits, code), h


define(
    "norm_quantize(Tensor x, Tensor? residual, Tensor? gain, Tensor? bias, float eps, bool center, bool round_first, "
    "Tensor scale, Tensor? visual, int bits, ScalarType? code=None) -> (Tensor, Tensor)",
    reference,
    fake,
)
