"""Which widths of a graph are transformed by the matrices that the kernels know."""

import pytest
import torch
from torch import Tensor, fx

from mmqc.ops.hadamard_matrix import hadamard_factors

known_transforms = pytest.importorskip("mmqc.lowering.known_transforms").known_transforms
ops = torch.ops.mmqc


class Model(torch.nn.Module):
    """A transform of 64 channels by its buffers, and one of 24 by what is given."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        for i, factor in enumerate(hadamard_factors(64)):
            self.register_buffer(f"f{i}", sign * factor.float())

    def forward(self, x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, object]:
        own = [buffer for _, buffer in self.named_buffers()]
        return ops.hadamard.default(x, own), ops.hadamard_quantize_per_token.default(y, None, [first, second], 4)


@pytest.mark.parametrize(("sign", "known"), [(1.0, {24, 64}), (-1.0, {24})])
def test_known_transforms__by_values_of_buffers_and_inputs(sign: float, known: set[int]) -> None:
    graph, factors = fx.symbolic_trace(Model(sign)), [f.float() for f in hadamard_factors(24)]
    x, y = torch.randn(2, 64), torch.randn(2, 24)
    assert known_transforms(graph, (x, y, *factors)) == known
    assert known_transforms(graph, (x, y, factors[0], torch.ones_like(factors[1]))) == known - {24}
    assert known_transforms(graph, ()) == known - {24}, "inputs are not known"
