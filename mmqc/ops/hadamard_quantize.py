"""A Hadamard transform, the gate in front of it and the quantization behind it: what stands in front of a down_proj.

    h = x,  or  silu(x) ∘ u            q = quantize(hadamard(h), s_x)

Shapes:  x, u [..., n]   the rest as in hadamard.py and quantize.py   q int8 or float8 [..., n]
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.ops import hadamard, quantize
from mmqc.ops.define import define


def check(x: Tensor, up: Tensor | None) -> None:
    """Raise unless the gate fits what it gates."""
    if up is not None and up.shape != x.shape:
        raise ValueError(f"gate and up have one shape, not {list(x.shape)} and {list(up.shape)}")


def reference(
    x: Tensor,
    up: Tensor | None,
    factors: list[Tensor],
    scale: Tensor,
    visual: Tensor | None,
    bits: int,
    code: torch.dtype | None = None,
) -> Tensor:
    """One after the other, each rounded to x's dtype as in the unfused model."""
    check(x, up)
    h = x if up is None else F.silu(x) * up
    return quantize.reference(hadamard.reference(h, factors), scale, visual, bits, code)


def fake(
    x: Tensor,
    up: Tensor | None,
    factors: list[Tensor],
    scale: Tensor,
    visual: Tensor | None,
    bits: int,
    code: torch.dtype | None = None,
) -> Tensor:
    """Codes like x."""
    check(x, up)
    return quantize.fake(hadamard.fake(x, factors), scale, visual, bits, code)


define(
    "hadamard_quantize(Tensor x, Tensor? up, Tensor[] factors, Tensor scale, Tensor? visual, int bits, "
    "ScalarType? code=None) -> Tensor",
    reference,
    fake,
)
