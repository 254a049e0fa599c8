import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

from mmqc.ops.hadamard import hadamard_factors

hadamard = torch.ops.mmqc.hadamard


def dense(n: int) -> torch.Tensor:
    return functools.reduce(torch.kron, hadamard_factors(n), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 17, 63, 64, 100, 257, 768, 960, 344])
@pytest.mark.parametrize("rows", [(), (1,), (5,), (2, 3)])
def test_hadamard__factored_equals_dense(n: int, rows: tuple[int, ...]) -> None:
    x = torch.randn(*rows, n, dtype=torch.float64)
    assert_close(hadamard(x, hadamard_factors(n)), x @ dense(n).T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hadamard__low_precision_rounds_once(dtype: torch.dtype) -> None:
    x = torch.randn(9, 240).to(dtype)
    y = hadamard(x, hadamard_factors(240))
    assert y.dtype == dtype
    assert_close(y, hadamard(x.double(), hadamard_factors(240)))


@settings(max_examples=25)
@given(n=st.integers(1, 400), seed=st.integers(0, 99))
def test_hadamard__inverse_is_transpose(n: int, seed: int) -> None:
    x = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    factors = hadamard_factors(n)
    assert_close(hadamard(hadamard(x, factors), [f.T for f in factors]), x)


def test_hadamard__strided_input() -> None:
    x = torch.randn(240, 7, dtype=torch.float64).T
    assert_close(hadamard(x, hadamard_factors(240)), x @ dense(240).T)


def test_hadamard__gradient() -> None:
    x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: hadamard(x, hadamard_factors(24)), x, fast_mode=True)


def test_hadamard__opcheck() -> None:
    for n in (1, 240):
        factors = [f.float() for f in hadamard_factors(n)]
        torch.library.opcheck(hadamard.default, (torch.randn(2, n, requires_grad=True), factors))


def test_hadamard__refuses_factors_of_another_width() -> None:
    with pytest.raises(ValueError, match="do not span a width of 13"):
        hadamard(torch.randn(2, 13), hadamard_factors(12))
