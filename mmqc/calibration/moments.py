"""Second moments H = Σ a_m X_mᵀ X_m of a linear's inputs, summed over batches without the float32 error.

    per chunk of 2,048 rows:  P = Xᵀ X in float32          then        H += a P in float64

Shapes:  X [M, K] in the model's dtype   H float64 [K, K]   a: weight of the rows' modality
Why:     Products of two bfloat16 or two float16 numbers are exact in float32, so a chunk only rounds while it adds up 2,048
         terms, by about 2,048^½ 2^-24 of the sum; between chunks nothing is lost, however many there are.  In float32
         throughout, 262,144 rows would lose 2^-15 and more, which can make H indefinite.
Cost:    128 x 2,048 rows at K = 18,944 are M K² = 9.4e13 multiplications, half of which symmetry saves: on tensor cores some
         tenths of a second, in float64 on a GPU with 1/64 of its float32 rate two minutes a layer.
Memory:  H, 2.9 GB there, and one panel of P: 2,048 rows of it, 0.16 GB.  Only blocks on and below the diagonal are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 2048
PANEL = 2048


def add_second_moment(h: Tensor | None, x: Tensor, weight: float = 1.0) -> Tensor:
    """``h`` + ``weight`` XᵀX in place, on and below the diagonal blocks; ``mirror_`` makes the rest.

    Args:
        h: float64 [K, K], or None for zero.
        x: floating point [M, K].
        weight: of all rows of ``x``.
    """
    return _added(h, x, x, weight, below=True)


def add_drift(d: Tensor | None, error: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
    """``d`` + ``weight`` EᵀY in place, summed as second moments are.

    Args:
        d: float64 [K, K], or None for zero.
        error: E = X - Y [M, K] in the dtype of Y, so that tensor cores take it; X is what another model is fed for the same rows.
        y: floating point [M, K].
        weight: of all rows.
    """
    return _added(d, error, y, weight, below=False)


def _added(h: Tensor | None, a: Tensor, b: Tensor, weight: float, below: bool) -> Tensor:
    """``h`` + ``weight`` AᵀB in place; ``below``: on and below the diagonal blocks."""
    width = b.shape[1]
    if h is None:
        h = torch.zeros(width, width, dtype=torch.float64, device=b.device)
    for left, right in zip(a.split(ROWS), b.split(ROWS), strict=True):
        for start in range(0, width, PANEL):
            stop = min(start + PANEL, width)
            end = stop if below else width
            h[start:stop, :end].add_(_product(left[:, start:stop], right[:, :end]), alpha=weight)
    return h


def mirror_(h: Tensor) -> Tensor:
    """Fill in the blocks above the diagonal from those below."""
    for start in range(0, len(h), PANEL):
        stop = min(start + PANEL, len(h))
        h[start:stop, stop:] = h[stop:, start:stop].mT
    return h


def narrowed_(h: Tensor) -> Tensor:
    """H in float32, in the first half of its own memory; ``h`` is used up."""
    flat = h.view(-1).view(torch.float32)
    for start in range(0, len(h), PANEL):
        rows = h[start : start + PANEL].float().view(-1)
        flat[start * h.shape[1] : start * h.shape[1] + len(rows)] = rows
    return flat[: h.numel()].view(h.shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Aᵀ B [I, J] of A [M, I] and B [M, J], products exact, summed in float32 at least."""
    if a.dtype in (torch.float16, torch.bfloat16):
        if a.is_cuda:
            return torch.mm(a.mT, b, out_dtype=torch.float32)
        a, b = a.float(), b.float()
    return a.mT @ b
