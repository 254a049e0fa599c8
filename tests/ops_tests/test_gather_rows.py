import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmqc.ops  # noqa: F401

gather_rows, modality_order = torch.ops.mmqc.gather_rows, torch.ops.mmqc.modality_order


@settings(max_examples=30)
@given(batch=st.integers(1, 4), length=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_gather_rows__there_and_back(batch: int, length: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    visual, x = torch.rand(batch, length, generator=g) > 0.5, torch.randn(batch, length, 3, generator=g)
    order, inverse = modality_order(visual, True)
    moved = gather_rows(x, order)
    assert torch.equal(moved[0], torch.cat((x[visual], x[~visual])))
    assert torch.equal(gather_rows(moved, inverse), x)


def test_gather_rows__opcheck_and_gradient() -> None:
    order, _ = modality_order(torch.rand(2, 5) > 0.5, True)
    torch.library.opcheck(gather_rows.default, (torch.randn(2, 5, 3, requires_grad=True), order))
    torch.library.opcheck(gather_rows.default, (torch.rand(2, 5) > 0.5, order))
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, order), x, fast_mode=True)


def test_gather_rows__refuses_a_vector() -> None:
    with pytest.raises(ValueError, match="at least 2 axes"):
        gather_rows(torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64))
