"""A Hadamard transform, the gate in front of it and the per-token quantization behind it: what stands in front of a down_proj.

    h = x,  or  silu(x) ∘ u            q, s, o = quantize_per_token(hadamard(h), b bits)

Shapes:  x, u [..., n]   factors as in hadamard.py   q int8 [..., n]   s, o [..., 1]: behind a non-linearity all channels are
         of one part (ResQ, arXiv:2412.14363, section 4.2)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mmqc.ops import hadamard, quantize_per_token
from mmqc.ops.define import define
from mmqc.ops.hadamard_quantize import check

Quantized = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, up: Tensor | None, factors: list[Tensor], bits: int) -> Quantized:
    """One after the other, each rounded to x's dtype as in the unfused model."""
    check(x, up)
    h = x if up is None else F.silu(x) * up
    return quantize_per_token.reference(hadamard.reference(h, factors), None, [x.shape[-1]], [bits])


def fake(x: Tensor, up: Tensor | None, factors: list[Tensor], bits: int) -> Quantized:
    """Int8 like x, and a scale and an offset a token."""
    check(x, up)
    return quantize_per_token.fake(hadamard.fake(x, factors), None, [x.shape[-1]], [bits])


define("hadamard_quantize_per_token(Tensor x, Tensor? up, Tensor[] factors, int bits) -> (Tensor, Tensor, Tensor)", reference, fake)
