"""What lies in memory when an op behind it is lowered."""

from collections.abc import Callable

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from mmqc.lowering import quantize
from mmqc.lowering.in_memory import is_in_memory

SCALE, WEIGHT = torch.tensor([0.02]), torch.randn(16, 16)


def codes(x: Tensor) -> Tensor:
    return torch.ops.mmqc.quantize(x, SCALE, None, 8)


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (codes, True),
        (lambda x: codes(x @ WEIGHT), True),
        (lambda x: codes((x @ WEIGHT).view(8, 32)), True),
        (lambda x: codes(x.transpose(0, 1)), False),
        (lambda x: codes((x @ WEIGHT)[:, 8:]), False),
        (lambda x: codes(x.relu()), False),
        (lambda x: (codes(y := x.relu()), y @ WEIGHT), False),
        (lambda x: (codes(y := x @ WEIGHT), y.relu()), True),
    ],
)
def test_is_in_memory(function: Callable[[Tensor], Tensor], known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor computes itself is joined with what reads it, if that is no launch."""
    asked: list[bool] = []
    monkeypatch.setattr(quantize, "has_kernel", lambda x: asked.append(is_in_memory(x)))
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(function, fullgraph=True)(torch.randn(16, 16))
    assert asked == [known]
