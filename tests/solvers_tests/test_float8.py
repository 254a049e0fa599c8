import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqc.ops.pack import FLOAT8
from mmqc.solvers.float8 import solve


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([1, 3, 17, 64]), st.floats(-6, 3))
def test_solve__error_is_a_sixteenth_of_the_number(seed: int, width: int, exponent: float) -> None:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(5, width, generator=g) * 10**exponent
    solved = solve(w)
    assert solved.codes.dtype == FLOAT8
    assert torch.equal(solved.codes.float().abs().amax(1), torch.full((5,), 448.0))
    error = (solved.dequantize() - w).abs()
    assert (error <= w.abs() / 16 * 1.001 + solved.scale[:, None] * 2**-10).all()


def test_solve__zeros_skipped_channels_and_what_cannot_be_rounded() -> None:
    assert torch.equal(solve(torch.zeros(2, 3)).dequantize(), torch.zeros(2, 3))
    solved = solve(torch.tensor([[100.0, 1.0, -2.0]]), skip=torch.tensor([0]))
    assert solved.codes.float().tolist() == [[0.0, 224.0, -448.0]]
    with pytest.raises(ValueError, match=r"a\.weight holds 1 values that are NaN"):
        solve(torch.tensor([[torch.nan, 1.0]]), name="a.weight")
