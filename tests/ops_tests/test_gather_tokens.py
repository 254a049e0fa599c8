import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmqc.ops  # noqa: F401

gather_tokens, modality_order = torch.ops.mmqc.gather_tokens, torch.ops.mmqc.modality_order


@settings(max_examples=30)
@given(batch=st.integers(1, 4), length=st.integers(1, 20), axis=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_gather_tokens__permutes_every_sequence(batch: int, length: int, axis: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    size = [batch, 2, 3, 4]
    size[axis] = length
    order, inverse = modality_order(torch.rand(batch, length, generator=g) > 0.5, False)
    x = torch.randn(size, generator=g)
    moved = gather_tokens(x, order, axis)
    for b in range(batch):
        assert torch.equal(moved[b], x[b].index_select(axis - 1, order[b]))
    assert torch.equal(gather_tokens(moved, inverse, axis - 4), x)


def test_gather_tokens__spreads_what_the_batch_shares() -> None:
    order, _ = modality_order(torch.rand(3, 5) > 0.5, False)
    table = torch.randn(5, 4)
    moved = gather_tokens(table, order, 1, 3)
    assert torch.equal(gather_tokens(table, order, -2, 4), moved[:, None])
    assert torch.equal(moved, gather_tokens(table[None], order, 1))
    assert torch.equal(moved, torch.stack([table[order[b]] for b in range(3)]))


@settings(max_examples=30)
@given(length=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_gather_tokens__a_mask_permuted_on_both_axes(length: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    order, _ = modality_order(torch.rand(2, length, generator=g) > 0.5, False)
    mask = torch.rand(2, 1, length, length, generator=g)
    moved = gather_tokens(gather_tokens(mask, order, -2), order, -1)
    for b in range(2):
        p = torch.eye(length)[order[b]]
        assert torch.equal(moved[b, 0], p @ mask[b, 0] @ p.T)


@pytest.mark.parametrize("size", [(2, 5, 3), (1, 5, 3), (5, 3)])
def test_gather_tokens__opcheck_and_gradient(size: tuple[int, ...]) -> None:
    order, _ = modality_order(torch.rand(2, 5) > 0.5, False)
    torch.library.opcheck(gather_tokens.default, (torch.randn(size, requires_grad=True), order, -2, 3))
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_tokens(x, order, -2, 3), x, fast_mode=True)


def test_gather_tokens__refuses_the_batch_axis() -> None:
    with pytest.raises(ValueError, match="no axis of tokens"):
        gather_tokens(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), 0)
