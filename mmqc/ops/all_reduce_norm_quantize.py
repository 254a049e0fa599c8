"""The sum over ranks, the residual, the norm and the static quantization behind it: what stands between two shared linears.

    q, h = norm_quantize(all_reduce(x), r, g, β, …)

Shapes:  x [..., D], equal on all ranks of the group   the others as in norm_quantize.py; h is never empty
Exact:   as norm_quantize and all_reduce, one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops import all_reduce, norm_quantize
from mmqc.ops.define import define


def reference(
    x: Tensor,
    group: str,
    residual: Tensor,
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
    total = all_reduce.reference(x, group)
    return norm_quantize.reference(total, residual, gain, bias, eps, center, round_first, scale, visual, bits, code)


def fake(
    x: Tensor,
    group: str,
    residual: Tensor,
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
    """Codes, and x + r."""
    del group
    return norm_quantize.fake(x, residual, gain, bias, eps, center, round_first, scale, visual, bits, code)


define(
    "all_reduce_norm_quantize(Tensor x, str group, Tensor residual, Tensor? gain, Tensor? bias, float eps, bool center, "
    "bool round_first, Tensor scale, Tensor? visual, int bits, ScalarType? code=None) -> (Tensor, Tensor)",
    reference,
    fake,
)
