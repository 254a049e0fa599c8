"""Numbers in place of an integer tensor reckon as it does."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqc.front.numbers import Numbers

SOME = st.integers(1, 9)
VECTORS = st.lists(SOME, min_size=1, max_size=4)
MATRICES = st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(SOME, min_size=n, max_size=n), min_size=1, max_size=4))
OPERATORS = pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.floordiv, operator.pow])


@given(VECTORS | MATRICES)
@settings(deadline=None, max_examples=60)
def test_numbers__are_asked_as_a_tensor_is(rows: list) -> None:
    tensor = torch.tensor(rows)
    numbers = Numbers.of(tensor)
    assert numbers.tolist() == rows
    assert type(numbers.tolist()[0]) in (int, list)
    assert numbers.shape == tuple(tensor.shape)
    for name in ("prod", "sum"):
        for dim in {-1, tensor.dim() - 1}:
            got, expected = getattr(numbers, name)(dim=dim), getattr(tensor, name)(dim=dim).tolist()
            assert (got.tolist() if isinstance(got, Numbers) else got) == expected


@OPERATORS
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_numbers__are_reckoned_with_as_a_tensor_is(op, data) -> None:
    a = data.draw(MATRICES)
    b = [[data.draw(st.integers(1, 3)) for _ in row] for row in a]
    for other in (2, b):
        expected = op(torch.tensor(a), torch.tensor(other) if isinstance(other, list) else other)
        its = Numbers.of(torch.tensor(other)) if isinstance(other, list) else other
        assert op(Numbers.of(torch.tensor(a)), its).tolist() == expected.tolist()


def test_numbers__what_they_do_not_know_is_an_error() -> None:
    matrix = Numbers.of(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="dimension 0 of numbers of shape"):
        matrix.prod(dim=0)
    with pytest.raises(ValueError, match="zip"):
        matrix + Numbers.of(torch.ones(3, 3, dtype=torch.long))
    with pytest.raises(AttributeError):
        matrix.cumsum(0)  # type: ignore[attr-defined]
