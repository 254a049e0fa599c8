"""Where a solver starts from if what a linear is fed has drifted away from what the floating-point model feeds it.

    W' = W + a W D (H + λ I)⁻¹        D = (X - Y)ᵀ Y        H = Yᵀ Y        λ = 1 % of H's mean diagonal

Shapes:  X, Y [M, K] inputs of the same rows, the floating-point model's and the quantized one's   W, W' [N, K]   D, H [K, K]
Why:     |X Wᵀ - Y Qᵀ|² = |Y (W' - Q)ᵀ|² + what no Q changes, for a = 1 and λ = 0: the solver that is given W' and H minimises
         the left side, and the linear makes up for what the quantized blocks in front of it did.
Share:   a = 1 takes all of it from 64 batches, and is worse on others than a = 1/2 (docs/adr/0055).
Skipped: columns of D and H that are 0, channels that something else computes, leave W as it is; their drift is in D's rows.
Source:  GPTAQ, arXiv:2504.02692, Section 3, "asymmetric calibration", which adds a term to each step of GPTQ's sweep; taken in
         front of the sweep it suits every solver.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.solvers.second_moment import check_hessian

SHARE = 0.5
DAMPING = 0.01


def toward_float(weight: Tensor, hessian: Tensor, drift: Tensor, share: float = SHARE, name: str = "weight") -> Tensor:
    """W' in the weight's dtype, computed in float64.

    Args:
        weight: W, floating point [N, K].
        hessian: H, float64 [K, K], positive semidefinite; in use until this returns, for its factor is all the memory it takes.
        drift: D, float64 [K, K], the rows weighted as in H.
        share: a, from 0 (W itself) to 1.
        name: FQN for error messages.

    Raises:
        ValueError: H is NaN or infinite somewhere, or not positive semidefinite.
    """
    check_hessian(hessian, weight, name, "asymmetric")
    used = hessian.diagonal() > 0
    if not used.any():
        return weight
    diagonal = hessian.diagonal()
    before = diagonal.clone()
    diagonal.add_(DAMPING * before.sum() / used.sum())
    factor, failed = torch.linalg.cholesky_ex(hessian)
    diagonal.copy_(before)
    if failed:
        raise ValueError(f"{name}: the second moment of its inputs is not positive semidefinite")
    step = torch.cholesky_solve((weight.double() @ drift).mT, factor).mT
    return (weight.double() + share * step).to(weight.dtype)
