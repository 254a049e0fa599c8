"""The second moment H = Xᵀ X of a layer's inputs, as calibration hands it to the solvers.

Shapes:  X [M, K], all rows that were seen    H [K, K], symmetric, positive semidefinite
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 1024  # rows of H that are multiplied at a time


def checked_hessian(hessian: Tensor | None, w: Tensor, name: str, solver: str) -> Tensor:
    """``hessian`` in float64 on the device of ``w`` [N, K]; raises as ``check_hessian``."""
    return check_hessian(hessian, w, name, solver).detach().to(w.device, torch.float64)


def check_hessian(hessian: Tensor | None, w: Tensor, name: str, solver: str) -> Tensor:
    """``hessian`` as it is.

    Raises:
        ValueError: there is none, or it has another shape, or is NaN or infinite somewhere.
    """
    k = w.shape[1]
    if hessian is None:
        raise ValueError(f"{name}: the {solver} solver needs calibration data; pass calibration=, or use solver 'mse_clip'")
    if hessian.shape != (k, k):
        raise ValueError(f"{name}: the second moment has shape {tuple(hessian.shape)}, but the weight has {k} input channels")
    if not torch.stack(torch.aminmax(hessian.detach())).isfinite().all():  # no mask of the size of H
        raise ValueError(f"{name}: the second moment of its inputs is NaN or infinite; the calibration run overflowed")
    return hessian


def quadratic(h: Tensor, x: Tensor) -> Tensor:
    """x * Y [K, N] whose sums over K are the columns' xᵀ H x, for half the products: Y is that of H's upper triangle, doubled.

    Args:
        h: symmetric [K, K].
        x: [K, N], of h's dtype.
    """
    out = torch.empty_like(x)
    for start in range(0, len(h), PANEL):
        at, behind = slice(start, start + PANEL), slice(start + PANEL, None)
        torch.mm(h[at, at], x[at], out=out[at])
        out[at].addmm_(h[at, behind], x[behind], alpha=2)
    return out.mul_(x)
