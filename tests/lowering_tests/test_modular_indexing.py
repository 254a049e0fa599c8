"""Remainders of sums with a negative term inside a division, which torch shortens to what may be negative."""

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from mmqc.lowering.modular_indexing import may_hide_a_sign, mend

X, K = sympy.Symbol("x", integer=True, nonnegative=True), sympy.Symbol("k", integer=True, positive=True)


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """Tiles side by side, less half of what was padded."""
    return x.permute(3, 1, 0, 2).reshape(8, 4, 8)[:, :, (8 - width // height) // 2 :] + 1


@pytest.mark.parametrize("size", [(30, 60), (30, 90), (20, 31)])
def test_compiled__a_crop_by_half_of_a_difference(size: tuple[int, int]) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 4, 4, 8)
    assert_close(torch.compile(crop, backend="mmqc", dynamic=True)(x, *size), crop(x, *size))


def test_mend__keeps_terms_and_comes_once() -> None:
    mend()
    mend()
    kept = ModularIndexing(X + 4 + FloorDiv(-K, 2), 1, 4)
    assert kept.has(sympy.Integer(4) + FloorDiv(-K, 2)) or kept.args[0] == X + 4 + FloorDiv(-K, 2)
    assert ModularIndexing(X + 4 * K, 1, 4) == ModularIndexing(X, 1, 4), "what is not negative is shortened as ever"


@settings(max_examples=60, deadline=None)
@given(
    a=st.integers(0, 9), b=st.integers(-9, 9), c=st.integers(1, 4), m=st.integers(2, 9), x=st.integers(0, 30), k=st.integers(1, 20)
)
def test_eval__is_the_remainder_where_c_divides(a: int, b: int, c: int, m: int, x: int, k: int) -> None:
    base = X + a * m + FloorDiv(b * K, c)
    if (value := int(base.subs({X: x, K: k}))) < 0:
        return
    rest = ModularIndexing(base, 1, m)
    inner = rest.args[0] if isinstance(rest, ModularIndexing) else rest
    assert int(inner.subs({X: x, K: k})) >= 0
    assert int(rest.subs({X: x, K: k})) == value % m


def test_may_hide_a_sign__in_divisions_alone() -> None:
    assert may_hide_a_sign(FloorDiv(-K, 2))
    assert may_hide_a_sign(3 * FloorDiv(X - K, 2))
    assert may_hide_a_sign(FloorDiv(FloorDiv(-K, 2) + X, 3))
    assert not may_hide_a_sign(FloorDiv(X + K, 2))
    assert not may_hide_a_sign(-X)
