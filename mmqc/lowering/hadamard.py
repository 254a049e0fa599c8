"""hadamard: on CUDA in half precision the Triton kernel; elsewhere one small matmul per Kronecker factor, without a transposition.

    y = x (F1 ⊗ … ⊗ Fr)ᵀ        last factor: [·, a] @ Fᵀ;  others: F @ [·, a, rest], batched, F shared by the batch

Shapes:  those of ops/hadamard.py
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mmqc import kernels
from mmqc.lowering.inductor import (
    TensorBox,
    batched_matmul,
    call_kernel,
    convert,
    has_kernel,
    lowerings,
    register_lowering,
    static_int,
)

aten = torch.ops.aten


def on_cuda() -> Any:
    """The launches, which need Triton."""
    return importlib.import_module("mmqc.lowering.rows_on_cuda")


def why_not(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel cannot take this node of an ATen graph."""
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    if x.device.type != "cuda" or not kernels.install():
        return None
    return on_cuda().why_not_transform(x, None)


def takes_transform(x: TensorBox, up: TensorBox | None = None, bits: int = 8, code: torch.dtype | None = None) -> bool:
    """Whether a transform of x goes to the CUDA kernel, which knows the matrix by the width alone."""
    return has_kernel(x) and on_cuda().takes_transform(x, up, bits, code)


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
    if takes_transform(x):
        return call_kernel(torch.ops.mmqc.hadamard.default, x, factors) if on_cuda().is_called(x) else on_cuda().transform(x)
    y = convert(apply_factors(convert(x, torch.promote_types(dtype, torch.float32)), factors), dtype)
    return y if factors else lowerings[aten.clone.default](y)
