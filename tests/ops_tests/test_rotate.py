import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

from mmqc.ops.rotate import random_hadamard, rotation_matrix

rotate = torch.ops.mmqc.rotate


@settings(max_examples=15)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_rotate__is_the_dense_rotation(n: int, seed: int) -> None:
    factors, signs = random_hadamard(n, seed)
    R = rotation_matrix(factors, signs)
    x = torch.randn(4, n, dtype=torch.float64)
    assert_close(R.T @ R, torch.eye(n, dtype=torch.float64))
    assert_close(rotate(x, factors, signs, False), x @ R)
    assert_close(rotate(x, factors, signs, True), x @ R.T)
    assert_close(rotate(rotate(x, factors, signs, False), factors, signs, True), x)


def test_random_hadamard__same_seed_same_signs() -> None:
    assert torch.equal(random_hadamard(64, 3)[1], random_hadamard(64, 3)[1])
    assert not torch.equal(random_hadamard(64, 3)[1], random_hadamard(64, 4)[1])
    assert random_hadamard(16, 0)[1].tolist() == [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotate__low_precision_rounds_once(dtype: torch.dtype, inverse: bool) -> None:
    factors, signs = random_hadamard(96, 0)
    x = torch.randn(5, 96).to(dtype)
    y = rotate(x, factors, signs, inverse)
    assert y.dtype == dtype
    assert_close(y, rotate(x.double(), factors, signs, inverse))


def test_rotate__gradient() -> None:
    factors, signs = random_hadamard(20, 0)
    x = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    for inverse in (False, True):
        assert torch.autograd.gradcheck(lambda x, i=inverse: rotate(x, factors, signs, i), x, fast_mode=True)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_rotate__opcheck(inverse: bool, grad: bool) -> None:
    factors, signs = random_hadamard(48, 0)
    factors = [f.float() for f in factors]
    torch.library.opcheck(rotate.default, (torch.randn(2, 3, 48, requires_grad=grad), factors, signs.float(), inverse))
