"""An RMSNorm and the per-token quantization behind it: what stands in front of q, k and v, or of gate and up.

    h = x + r                                       (only with a residual r; h is a result too)
    y = h / sqrt(mean(h²) + eps) [∘ g] [+ β]        (norm.py)
    q, s, o = quantize_per_token(y, order, K_p, bits)

Shapes:  x, r, h [..., D]   g, β [D] or none   order, widths, bits, q, s and o as in quantize_per_token.py
         h is empty ([0]) without a residual
Exact:   float32 at least, and rounded where modules round: y once, to x's dtype; with ``round_first``, as transformers' RMSNorms
         do, in front of the gain, and again behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmqc.ops import quantize_per_token
from mmqc.ops.define import define
from mmqc.ops.norm_quantize import check, normed

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]


def reference(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    round_first: bool,
    order: Tensor | None,
    widths: Sequence[int],
    bits: Sequence[int],
) -> Quantized:
    """One after the other."""
    check(x, residual, gain, bias)
    h = x if residual is None else x + residual
    y = normed(h, gain, bias, eps, round_first)
    return *quantize_per_token.reference(y, order, widths, bits), x.new_empty(0) if residual is None else h


def fake(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    round_first: bool,
    order: Tensor | None,
    widths: Sequence[int],
    bits: Sequence[int],
) -> Quantized:
    """Codes, scales and offsets, and x + r where there is a residual."""
    del eps, round_first
    check(x, residual, gain, bias)
    h = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return *quantize_per_token.fake(x, order, widths, bits), h


define(
    "norm_quantize_per_token(Tensor x, Tensor? residual, Tensor? gain, Tensor? bias, float eps, bool round_first, "
    "Tensor? order, int[] widths, int[] bits) -> (Tensor, Tensor, Tensor, Tensor)",
    reference,
    fake,
)
