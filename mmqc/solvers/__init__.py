"""Weight solvers: from a floating-point matrix to integer codes and scales; one file per method."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.solvers import awq_clip, float8, gptq, integer_scale, mse_clip, rtn
from mmqc.solvers.quantized import Quantized

__all__ = ["SOLVERS", "Quantized", "solve"]

OVERWRITING = ("gptq", "learned")
SOLVERS: dict[str, Any] = {
    "rtn": rtn.solve,
    "mse_clip": mse_clip.solve,
    "awq_clip": awq_clip.solve,
    "gptq": gptq.solve,
    "learned": gptq.solve,  # what learning starts from, block by block (calibration/learn.py)
}


def solve(
    weight: Tensor,
    spec: WeightSpec,
    hessian: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    name: str = "weight",
    overwrite: bool = False,
) -> Quantized:
    """Quantizes ``weight`` [N, K] with the solver that ``spec`` names, and makes its scales integers if ``spec`` says so.

    Args:
        weight: floating point [N, K].
        spec: bits, granularity and solver.
        hessian: XᵀX [K, K] of the layer's inputs; gptq and awq_clip need it.
        skip: int64 indices of input channels that something else computes; their codes are 0.
        name: FQN for error messages.
        overwrite: ``hessian`` may be used up.

    Raises:
        ValueError: the weight, or the hessian, cannot be used; says why and what to do.
    """
    if spec.type == "float":
        return float8.solve(weight, skip=skip, name=name)
    if spec.float_zero and skip is not None:
        raise ValueError(
            f"{name} keeps {len(skip)} input channels apart, whose weights here have to be exactly 0, and zero points of type "
            f"'float' lie between the codes: zero_point='int', or no channels kept apart (suppress=False)"
        )
    more = {"overwrite": True} if overwrite and spec.solver in OVERWRITING else {}
    solved = SOLVERS[spec.solver](weight, spec, hessian, skip=skip, name=name, **more)
    if spec.amplifier is None:
        return solved
    return integer_scale.with_integer_scales(solved, spec, name=name)
