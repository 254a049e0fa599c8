"""Weight solvers: from a floating-point matrix to integer codes and scales; one file per method."""

from __future__ import annotations

from torch import Tensor

from ..config import WeightSpec
from . import awq_clip, gptq, mse_clip, rtn
from .quantized import Quantized

__all__ = ["SOLVERS", "Quantized", "solve"]

SOLVERS = {"rtn": rtn.solve, "mse_clip": mse_clip.solve, "awq_clip": awq_clip.solve, "gptq": gptq.solve}


def solve(
    weight: Tensor, spec: WeightSpec, hessian: Tensor | None = None, *, skip: Tensor | None = None, name: str = "weight"
) -> Quantized:
    """Quantizes ``weight`` [N, K] with the solver that ``spec`` names.

    Args:
        weight: floating point [N, K].
        spec: bits, granularity and solver.
        hessian: XᵀX [K, K] of the layer's inputs; gptq and awq_clip need it.
        skip: int64 indices of input channels that something else computes; their codes are 0.
        name: FQN for error messages.

    Raises:
        ValueError: the weight, or the hessian, cannot be used; says why and what to do.
    """
    return SOLVERS[spec.solver](weight, spec, hessian, skip=skip, name=name)
