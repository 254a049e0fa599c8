"""Multiplication by an orthogonal matrix that is a Kronecker product, without ever forming it.

    y = x (F1 ⊗ F2 ⊗ … ⊗ Fr)ᵀ        n = a1 a2 … ar

Shapes:  x [..., n]   Fi [ai, ai]   y [..., n]
Cost:    n (a1 + … + ar) multiply-adds a row instead of n².
Exact:   computed in float32 at least (float64 stays), rounded once to x's dtype.
The matrices are built in hadamard_matrix.py (``hadamard_factors``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.hadamard_matrix import hadamard_factors, hadamard_kind

__all__ = ["apply_factors", "fake", "hadamard_factors", "hadamard_kind", "reference"]


def check(x: Tensor, factors: list[Tensor]) -> None:
    """Raise unless the factors are square and their sizes multiply to the width of x."""
    sizes = [f.shape[0] for f in factors]
    if any(f.dim() != 2 or f.shape[0] != f.shape[1] for f in factors) or math.prod(sizes) != x.shape[-1]:
        raise ValueError(f"factors of shapes {[list(f.shape) for f in factors]} do not span a width of {x.shape[-1]}")


def apply_factors(x: Tensor, factors: list[Tensor]) -> Tensor:
    """The product, factor by factor, last one first; only the last axis is ever multiplied from the right."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y, rest = x.to(dtype), 1
    for factor in reversed(factors):
        factor, a = factor.to(dtype), factor.shape[0]
        if rest == 1:
            y = y.reshape(-1, a) @ factor.t()
        else:
            y = y.reshape(-1, a, rest)
            y = torch.bmm(factor.expand(y.shape[0], a, a), y)
        rest *= a
    return y.reshape(x.shape).to(x.dtype)


def reference(x: Tensor, factors: list[Tensor]) -> Tensor:
    """The product, in a new tensor."""
    check(x, factors)
    y = apply_factors(x, factors)
    return y if factors else y.clone(memory_format=torch.contiguous_format)


def fake(x: Tensor, factors: list[Tensor]) -> Tensor:
    """Like x, contiguous."""
    check(x, factors)
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    transposed = [f.t() for f in ctx.saved_tensors]
    return torch.ops.mmqc.hadamard(grad, transposed), [None] * len(transposed)


define("hadamard(Tensor x, Tensor[] factors) -> Tensor", reference, fake)
torch.library.register_autograd("mmqc::hadamard", _backward, setup_context=_keep)
