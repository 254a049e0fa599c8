import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmqc.ops  # noqa: F401

o = torch.ops.mmqc


@settings(max_examples=30)
@given(batch=st.integers(1, 3), length=st.integers(1, 20), more=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_causal_mask__is_the_permuted_triangle(batch: int, length: int, more: int, seed: int) -> None:
    visual = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) > 0.5
    order, _ = o.modality_order(visual, False)
    k = torch.empty(batch, 2, length + more, 4)
    triangle = torch.ones(length, length + more, dtype=torch.bool).tril()
    assert torch.equal(o.causal_mask(order, None, k), o.gather_tokens(triangle, order, -2, 4))
    square = o.gather_tokens(o.gather_tokens(triangle[:, :length], order, -2, 4), order, -1)
    assert torch.equal(o.causal_mask(order, order, k), square)


def test_causal_mask__paper_equation_9() -> None:
    visual = torch.tensor([[False, False, True, True, False]])  # text text image image text
    order, _ = o.modality_order(visual, False)
    allowed = o.causal_mask(order, order, torch.empty(1, 1, 5, 2))[0, 0].int()
    assert order.tolist() == [[2, 3, 0, 1, 4]]
    expected = [[1, 0, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert allowed.tolist() == expected


def test_causal_mask__opcheck() -> None:
    order, inverse = o.modality_order(torch.rand(2, 5) > 0.5, False)
    torch.library.opcheck(o.causal_mask.default, (order, None, torch.randn(2, 3, 6, 4)))
    torch.library.opcheck(o.causal_mask.default, (order, inverse, torch.randn(2, 3, 5, 4)))
