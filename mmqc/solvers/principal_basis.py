"""ResQ's basis: the directions in which activations vary most come last, and each subspace is mixed at random.

    M = Xᵀ X = P Λ Pᵀ, Λ rising        U = P [[R_l, 0], [0, R_h]]        x = (x U) Uᵀ, exactly
    with three levels the first coordinates of all are a subspace of their own; the baseline "outlier + rotation" takes for P the
    permutation that sorts channels by max |x|, rising

Shapes:  X [rows, n]   M, P, U [n, n]   R_l [n - r, n - r]   R_h [r, r], random orthogonal or randomized Hadamard
Why:     the last r coordinates of x U have the largest energy of all r-dimensional projections, which lowers the bound on the error
         of quantizing them in more bits than the rest (Theorem 4.2); R makes the coordinates of a subspace alike.
Source:  Saxena et al., arXiv:2412.14363, section 4.2, equation 5.  The authors' damping of M leaves P as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.rotate import random_hadamard, rotation_matrix


def high_width(width: int, fraction: float) -> int:
    """R: the high-precision coordinates of a space of ``width``; at least one where a fraction is asked for."""
    return min(width - 1, max(1, round(width * fraction))) if fraction and width > 1 else 0


def random_orthogonal(n: int, seed: int) -> Tensor:
    """A Haar-random orthogonal matrix float64 [n, n]; the same on every platform up to rounding."""
    gauss = torch.randn(n, n, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(gauss)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def principal_basis(moment: Tensor, high: int, seed: int = 0, random: str = "orthogonal", lowest: int = 0) -> Tensor:
    """U float64 [n, n] on the device of ``moment``.

    Args:
        moment: XᵀX [n, n], up to any positive factor.
        high: r, 0 <= r < n.
        seed: of the random matrices.
        random: "orthogonal" or "hadamard".
        lowest: coordinates of a third subspace, that of the smallest variance; r + lowest < n.

    Raises:
        ValueError: a moment that is no square matrix or not finite, or subspaces that do not fit.
    """
    n = moment.shape[-1]
    if moment.shape != (n, n) or not 0 <= high + lowest < n:
        raise ValueError(f"a basis of {n} with {high} high coordinates and {lowest} lowest ones from a moment {list(moment.shape)}")
    if not bool(torch.isfinite(moment).all()):
        raise ValueError("the second moment is NaN or infinite; the calibration run overflowed")
    m = moment.double()
    _, p = torch.linalg.eigh((m + m.T) / 2)
    return _mixed(p, high, seed, random, lowest)


def peak_basis(peaks: Tensor, high: int, seed: int = 0, random: str = "orthogonal", lowest: int = 0) -> Tensor:
    """U float64 [n, n]: the channels of the largest ``peaks`` [n], max |x|, are the high subspace; as ``principal_basis``."""
    n = len(peaks)
    if peaks.dim() != 1 or not 0 <= high + lowest < n:
        raise ValueError(f"a basis of {n} with {high} high coordinates and {lowest} lowest ones from peaks {list(peaks.shape)}")
    order = peaks.argsort(stable=True)
    return _mixed(torch.eye(n, dtype=torch.float64, device=peaks.device)[:, order], high, seed, random, lowest)


def _mixed(p: Tensor, high: int, seed: int, random: str, lowest: int) -> Tensor:
    """Each subspace of the columns of p mixed at random."""
    mix = random_orthogonal if random == "orthogonal" else _hadamard
    sizes = [lowest, p.shape[1] - lowest - high, high]
    return torch.cat([part @ mix(part.shape[1], seed).to(p) for part in p.split(sizes, dim=1) if part.shape[1]], 1)


def _hadamard(n: int, seed: int) -> Tensor:
    return rotation_matrix(*random_hadamard(n, seed))
