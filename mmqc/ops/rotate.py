"""Multiplication by a randomized Hadamard matrix, or by its inverse.

    y = x R   or   y = x Rᵀ        R = diag(σ) (F1 ⊗ F2 ⊗ …),  σ in {-1, 1}ⁿ

Shapes:  x [..., n]   Fi [ai, ai]   σ [n]   y [..., n]
Exact:   computed in float32 at least (float64 stays), rounded once to x's dtype.
Where a rotation's producer and its reader sit in different graphs, passes leave this op at the boundary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.hadamard import apply_factors, check
from mmqc.ops.hadamard_matrix import hadamard_factors


def random_hadamard(n: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """(factors, signs) of a randomized Hadamard matrix of size n, in float64; the same on every platform."""
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(0, 2, (n,), generator=generator, device="cpu").double() * 2 - 1
    return hadamard_factors(n), signs


def mean_reflection(factors: list[Tensor], signs: Tensor) -> Tensor:
    """The unit vector w [n] for which R (I - 2 w wᵀ) maps the constant vector to itself; zeros where R does so already.

    The reflection swaps 1/√n and its image under R.  It changes an entry of R by O(1/n), so the entries stay as flat.
    """
    n = signs.shape[0]
    constant = torch.full((n,), n**-0.5, dtype=torch.float64, device=signs.device)
    w = reference(constant, [f.double() for f in factors], signs.double(), inverse=False) - constant
    length = w.norm()
    return w / length if length > 1e-6 else torch.zeros_like(w)


def reflect(x: Tensor, w: Tensor) -> Tensor:
    """X (I - 2 w wᵀ) along the last axis, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, w = x.to(dtype), w.to(dtype)
    return (wide - 2 * (wide * w).sum(-1, keepdim=True) * w).to(x.dtype)


def rotation_matrix(factors: list[Tensor], signs: Tensor) -> Tensor:
    """R as a dense float64 matrix, for fusing it into weights."""
    dense = functools.reduce(torch.kron, [f.double() for f in factors], torch.ones(1, 1, dtype=torch.float64))
    return signs.double().unsqueeze(1) * dense


def reference(x: Tensor, factors: list[Tensor], signs: Tensor, inverse: bool) -> Tensor:
    """X R = ((x ∘ σ) F), x Rᵀ = (x Fᵀ) ∘ σ."""
    check(x, factors)
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, signs = x.to(dtype), signs.to(dtype)
    if inverse:
        return (apply_factors(wide, factors) * signs).to(x.dtype)
    y = apply_factors(wide * signs, [f.t() for f in factors])
    return y.to(x.dtype)


def fake(x: Tensor, factors: list[Tensor], signs: Tensor, inverse: bool) -> Tensor:
    """Like x, contiguous."""
    del inverse
    check(x, factors)
    if signs.shape != (x.shape[-1],):
        raise ValueError(f"signs have shape [{x.shape[-1]}], not {list(signs.shape)}")
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, factors, signs, ctx.inverse = inputs
    ctx.save_for_backward(signs, *factors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    signs, *factors = ctx.saved_tensors
    return torch.ops.mmqc.rotate(grad, factors, signs, not ctx.inverse), [None] * len(factors), None, None


define("rotate(Tensor x, Tensor[] factors, Tensor signs, bool inverse) -> Tensor", reference, fake)
torch.library.register_autograd("mmqc::rotate", _backward, setup_context=_keep)
