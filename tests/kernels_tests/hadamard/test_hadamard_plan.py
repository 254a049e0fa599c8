"""The two matrices of a transform, and which factors they stand for."""

import functools

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import hadamard

plans = pytest.importorskip("mmqc.kernels.hadamard.hadamard_plan")


@pytest.mark.parametrize("n", [64, 128, 192, 1280, 3584, 18944, 5120, 2048, 4304, 27, 11008, 14336, 1])
def test_hadamard_plan__matrices_are_the_op_s(n):
    t = plans.best_tiling(n)
    assert t.a * t.b == n
    outer, inner = plans.matrices(t, n)
    expected = functools.reduce(torch.kron, hadamard.hadamard_factors(n), torch.ones(1, 1).double()) if n <= 6000 else None
    x = torch.randn(2, n, dtype=torch.float64)
    y = x.reshape(2, t.a, t.b)
    if t.a > 1:
        y = torch.einsum("ik,mkj->mij", outer[: t.a, : t.a] / t.a**0.5, y)
    y = (y @ inner[: t.b, : t.b].t() / t.b**0.5).reshape(2, n)
    assert_close(y, hadamard.reference(x, hadamard.hadamard_factors(n)) if expected is None else x @ expected.t())


@pytest.mark.parametrize("n", [3420, 8960])
def test_hadamard_plan__names_a_width_without_tiling(n):
    assert "no cut of width" in plans.best_tiling(n)


def test_matrices_of__other_factors_are_refused():
    factors = [f.float() for f in hadamard.hadamard_factors(64)]
    given = 64, torch.device("cpu"), torch.float32
    assert plans.matrices_of(factors)(*given) is plans.hadamard_plan(*given)
    assert "not those of" in plans.matrices_of([-factors[0], *factors[1:]])(*given).reason
