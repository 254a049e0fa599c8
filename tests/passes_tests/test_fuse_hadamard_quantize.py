"""One operation for the gate, the transform and the quantization in front of a down_proj."""

from typing import Any

import pytest
import torch
from fusion_cases import Gated, compile_and_compare, linear
from torch.nn import functional as F


@pytest.mark.parametrize("act", [F.silu, F.gelu])
def test_fuse_hadamard_quantize__hadamard(act: Any, without_inductor: None) -> None:
    ops, _ = compile_and_compare(Gated(linear(8, hadamard=True), act), torch.randn(2, 3, 32))
    assert ops == {"hadamard_quantize": 1, "scaled_matmul": 1}


def test_fuse_hadamard_quantize__hadamard_that_something_else_reads(without_inductor: None) -> None:
    down = linear(8, hadamard=True)
    down.outlier_index, down.outlier_weight = torch.tensor([3, 9]), torch.randn(8, 2)
    ops, misses = compile_and_compare(Gated(down), torch.randn(2, 3, 32))
    assert ops == {"hadamard": 1, "quantize": 1, "scaled_matmul_epilogue": 1}
    assert "2 operations read" in misses["fuse_hadamard_quantize"][0]


@pytest.mark.parametrize("act", [F.silu, F.gelu])
def test_fuse_hadamard_quantize__hadamard_through_inductor(act: Any) -> None:
    model, x = Gated(linear(8, hadamard=True), act), torch.randn(2, 3, 32)
    with torch.no_grad():
        difference = torch.compile(model, backend="mmqc", fullgraph=True)(x) - model(x)
    assert difference.abs().max() <= 127 * 0.05 + 1e-3, "a code or two may fall on the other side"
    assert (difference.abs() > 1e-3).float().mean() < 0.2
