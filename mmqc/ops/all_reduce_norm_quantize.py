"""The sum over ranks, the residual, the norm and the static quantization behind it: what stands between two shared linears.

    q, h = norm_quantize(all_reduce(x), r, g, β, …)

Shapes:  x [..., D], equal on all ranks of the group   the others as in norm_quantize.py; h is never empty
Exact:   as norm_quantize and all_reduce, one after the other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmqc.ops import all_reduce, norm_quantize
from mmqc.ops.define import define


def reference(x: Tensor, group: str, *of_norm: Any) -> tuple[Tensor, Tensor]:
    """One after the other."""
    return norm_quantize.reference(all_reduce.reference(x, group), *of_norm)


def fake(x: Tensor, group: str, *of_norm: Any) -> tuple[Tensor, Tensor]:
    """Codes, and x + r."""
    del group
    return norm_quantize.fake(x, *of_norm)


define(
    "all_reduce_norm_quantize(Tensor x, str group, Tensor residual, Tensor? gain, Tensor? bias, float eps, bool center, "
    "bool round_first, Tensor scale, Tensor? visual, int bits, ScalarType? code=None) -> (Tensor, Tensor)",
    reference,
    fake,
)
