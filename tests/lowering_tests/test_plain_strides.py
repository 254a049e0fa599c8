"""Strides found by arithmetic are those that Inductor finds."""

import pytest
import sympy
from torch._inductor.codegen.cpp import stride_at_vec_range
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from mmqc.lowering.plain_strides import plain_strides

X, Y, S = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("x0", "x1", "s0"))


@pytest.mark.parametrize(
    ("index", "stride"),
    [
        (768 * X + Y, 1),
        (X + 64 * (Y + S * X), 64),
        ((X + 3) * (Y + 1) - X * Y, 3),
        (X * S + 5, 0),
        (S * Y + X, S),
        (64 * FloorDiv(Y, 16) + X, 0),
        (X + ModularIndexing(Y, 1, 32), 1),
        (X + FloorDiv(Y, 3), None),
    ],
)
def test_plain_strides__as_inductor_finds_them(index: sympy.Expr, stride: object) -> None:
    stride_at_vec_range.cache_clear()
    expected = stride_at_vec_range(index, Y, 16)
    stride_at_vec_range.cache_clear()
    with plain_strides():
        got = stride_at_vec_range(index, Y, 16)
    assert got == expected
    assert got.is_number == expected.is_number
    assert stride is None or got == stride
