"""Round to nearest: the largest magnitude of a row, or of a group, becomes the largest code.

    s = max|w| / (2^(b-1) - 1)        q = round(w / s)

Shapes:  w [N, K]    s [N] or [N, K/g]    q int8 [N, K]
Error:   |w - q s| <= s/2 for every element
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import WeightSpec
from .quantized import Quantized, checked, levels, positive, rounded


def absmax_scale(w: Tensor, bits: int) -> Tensor:
    """max|w| / (2^(b-1) - 1) over the last axis as float32; 1 where that is zero."""
    return positive(w.abs().amax(-1) / levels(bits)[1])


def solve(
    weight: Tensor, spec: WeightSpec, hessian: Tensor | None = None, *, skip: Tensor | None = None, name: str = "weight"
) -> Quantized:
    """Quantizes ``weight`` by rounding to nearest.

    Args:
        weight: floating point [N, K].
        spec: bits and granularity are read.
        hessian: not used; every solver takes the same arguments.
        skip: int64 indices of input channels that something else computes; their codes are 0.
        name: FQN for error messages.

    Raises:
        ValueError: NaN or infinite values, or groups that do not divide K.
    """
    w = checked(weight, name)
    if skip is not None:
        w = w.index_fill(1, skip.to(w.device), 0)
    if not spec.group_size:
        scale = absmax_scale(w, spec.bits)
        return Quantized(rounded(w, scale[:, None], spec.bits).to(torch.int8), scale)
    n, k = w.shape
    if k % spec.group_size:
        raise ValueError(
            f"{name} has {k} input channels, which groups of {spec.group_size} do not divide; choose a group size "
            f"that does, PerRow(), or list the layer in QuantConfig.keep"
        )
    groups = w.reshape(n, -1, spec.group_size)
    scale = absmax_scale(groups, spec.bits)
    return Quantized(rounded(groups, scale[:, :, None], spec.bits).to(torch.int8).reshape(n, k), scale)
