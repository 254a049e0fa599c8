import pytest
import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from mmqc.lowering.small_constants import small_constants_in_memory


@pytest.mark.parametrize(("device", "kept"), [("cuda", True), ("cpu", False)])
def test_small_constants_in_memory__on_a_gpu(device: str, kept: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        scale, row = torch.empty(2, device=device), torch.empty(9, device=device)
    assert GraphLowering.can_inline_constant(scale)
    with small_constants_in_memory():
        assert GraphLowering.can_inline_constant(scale) is not kept
        assert not GraphLowering.can_inline_constant(row)
    assert GraphLowering.can_inline_constant(scale)
