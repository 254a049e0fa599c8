"""Multiplication by a basis and the per-token quantization behind it: keys behind RoPE, into ResQ's U_C.

    q, s, o = quantize_per_token(x U, K_p, bits)

Shapes:  x [..., D]   U [D, D] in x's dtype   q int8 [..., D]   s, o [..., P]: quantize_per_token.py
Exact:   x U is rounded to x's dtype, as a product of its own is.
Source:  ResQ, arXiv:2412.14363, section 4.3: RoPE stands between U_C and the weights, so it is applied at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmqc.ops import quantize_per_token
from mmqc.ops.define import define

Quantized = tuple[Tensor, Tensor, Tensor]


def check(x: Tensor, basis: Tensor) -> None:
    """Raise unless the basis turns the last axis of x."""
    if basis.shape != (x.shape[-1], x.shape[-1]) or basis.dtype != x.dtype:
        raise ValueError(f"a basis of {x.dtype} [{x.shape[-1]}, {x.shape[-1]}] turns this x, not {basis.dtype} {list(basis.shape)}")


def reference(x: Tensor, basis: Tensor, widths: Sequence[int], bits: Sequence[int]) -> Quantized:
    """One after the other."""
    check(x, basis)
    return quantize_per_token.reference(x @ basis, None, widths, bits)


def fake(x: Tensor, basis: Tensor, widths: Sequence[int], bits: Sequence[int]) -> Quantized:
    """As of x itself."""
    check(x, basis)
    return quantize_per_token.fake(x, None, widths, bits)


define("basis_quantize_per_token(Tensor x, Tensor basis, int[] widths, int[] bits) -> (Tensor, Tensor, Tensor)", reference, fake)
