"""The variable-length call in generated code: the same for any length, by a call without the dispatcher where our kernel is."""

from typing import Any

import pytest
import torch
from often import often
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache

from mmqc.compiler.record import collect_records
from mmqc.kernels.attention import variable_length
from mmqc.lowering import segment_attention
from tests.support.tolerance import assert_close


def attend(x: Tensor, ends: Tensor, longest: int) -> Tensor:
    q, k, v = (x + 1).split((4, 2, 2), 1)
    ends = ends * 1
    y = torch.ops.mmqc_front.scaled_dot_product_attention(q * 2, k, v, ends, ends, 0.3, True, longest)
    return y.transpose(1, 2).flatten(2) * 3


@pytest.mark.parametrize("hopper", often((False, True), True))
def test_lower__equals_the_op_at_any_length(monkeypatch: pytest.MonkeyPatch, hopper: bool) -> None:
    monkeypatch.setattr(segment_attention, "has_warpgroup_products", lambda device: hopper)
    reference, same = variable_length.reference, []

    def watched(*args: Any) -> Tensor:
        same.append(args[3].data_ptr() == args[4].data_ptr())
        return reference(*args)

    watched.__module__, watched.__name__ = reference.__module__, reference.__name__
    monkeypatch.setattr(variable_length, "reference", watched)
    torch._dynamo.reset()
    with collect_records() as records, fresh_inductor_cache(), torch.no_grad():
        run = torch.compile(attend, backend="mmqc", fullgraph=True, dynamic=True)
        for lengths in ((5, 4), (3, 9), (1, 1, 6)):
            x, ends = torch.randn(1, 8, sum(lengths), 16), torch.tensor((0, *lengths)).cumsum(0).int()
            assert_close(run(x, ends, max(lengths)), attend(x, ends, max(lengths)))
    assert same == ([True] * 3 if hopper else [])
    called = "mmqc variable_length.reference" if hopper else "extern mmqc_front.scaled_dot_product_attention"
    assert called in records[0].kernels
