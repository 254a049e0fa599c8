import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmqc.ops  # noqa: F401

modality_order = torch.ops.mmqc.modality_order
masks = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**31)).map(
    lambda c: torch.rand(c[0], c[1], generator=torch.Generator().manual_seed(c[2])) > 0.5
)


@settings(max_examples=40)
@given(visual=masks, flat=st.booleans())
def test_modality_order__is_the_stable_argsort(visual: torch.Tensor, flat: bool) -> None:
    order, inverse = modality_order(visual, flat)
    rows = visual.reshape(1, -1) if flat else visual
    assert torch.equal(order, (~rows).int().argsort(dim=1, stable=True))
    assert inverse.shape == visual.shape
    assert torch.equal(order.gather(1, inverse.reshape(order.shape)), torch.arange(order.shape[1]).expand(order.shape))


@settings(max_examples=20)
@given(visual=masks)
def test_modality_order__visual_rows_come_first(visual: torch.Tensor) -> None:
    order, _ = modality_order(visual, True)
    there = visual.reshape(-1)[order[0]]
    count = int(visual.sum())
    assert there[:count].all()
    assert not there[count:].any()


@pytest.mark.parametrize("flat", [False, True])
def test_modality_order__opcheck(flat: bool) -> None:
    torch.library.opcheck(modality_order.default, (torch.rand(2, 7) > 0.5, flat))


@pytest.mark.parametrize("visual", [torch.zeros(3, dtype=torch.bool), torch.zeros(2, 3)])
def test_modality_order__refuses(visual: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="visual is bool"):
        modality_order(visual, True)
