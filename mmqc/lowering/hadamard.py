"""hadamard: on CUDA in half precision the Triton kernel; elsewhere one small matmul per Kronecker factor, without a transposition.

    y = x (F1 ⊗ … ⊗ Fr)ᵀ        last factor: [·, a] @ Fᵀ;  others: F @ [·, a, rest], batched, F shared by the batch

Shapes:  those of ops/hadamard.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from mmqc import kernels
from mmqc.kernels.hadamard.hadamard_plan import why_no_tiling
from mmqc.lowering.inductor import (
    TensorBox,
    batched_matmul,
    call_kernel,
    convert,
    has_kernel,
    is_known_transform,
    lowerings,
    register_lowering,
    static_int,
)
from mmqc.lowering.scaled_matmul import on_cuda

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def why_not(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel cannot take this node of an ATen graph."""
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    if x.device.type != "cuda" or not kernels.install():
        return None
    if x.dtype not in HALF:
        return f"{x.dtype} activations are transformed in float32 or wider"
    return why_no_tiling(int(x.shape[-1]))


def takes_transform(x: TensorBox) -> bool:
    """Whether a transform of x goes to the CUDA kernel, which knows the matrix by the width alone."""
    width = static_int(x.get_size()[-1])
    return has_kernel(x) and x.get_dtype() in HALF and why_no_tiling(width) is None and is_known_transform(width)


def apply_factors(x: TensorBox, factors: Sequence[TensorBox]) -> TensorBox:
    """The product in x's dtype (float32 or float64)."""
    view, permute, expand = (lowerings[aten.view.default], lowerings[aten.permute.default], lowerings[aten.expand.default])
    size = list(x.get_size())
    rows, n, rest, y = math.prod(size[:-1]), static_int(size[-1]), 1, x
    for factor in reversed(factors):
        factor, a = convert(factor, x.get_dtype()), static_int(factor.get_size()[0])
        batch = rows * (n // (a * rest))
        if rest == 1:
            y = lowerings[aten.mm.default](view(y, [batch, a]), permute(factor, [1, 0]))
        else:
            y = batched_matmul(expand(factor, [batch, a, a]), view(y, [batch, a, rest]))
        rest = rest * a
    return view(y, size)


@register_lowering(torch.ops.mmqc.hadamard.default, type_promotion_kind=None)
def lower_hadamard(x: TensorBox, factors: Sequence[TensorBox]) -> TensorBox:
    """Float32 at least in between, rounded once; the kernel rounds between its two products as well."""
    dtype = x.get_dtype()
    if takes_transform(x) and on_cuda().by_call_transform(x):
        return call_kernel(torch.ops.mmqc.hadamard.default, x, factors)
    if takes_transform(x):
        return on_cuda().hadamard(x)
    y = convert(apply_factors(convert(x, torch.promote_types(dtype, torch.float32)), factors), dtype)
    return y if factors else lowerings[aten.clone.default](y)
