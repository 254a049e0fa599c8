"""One operation for the gate, the transform and the quantization in front of a down_proj."""

from typing import Any

import pytest
import torch
from fusion_cases import Gated, compile_and_compare, linear
from torch.nn import functional as F

from mmqc.ops import hadamard_quantize_kept


@pytest.mark.parametrize("act", [F.silu, F.gelu])
def test_fuse_hadamard_quantize__hadamard(act: Any, without_inductor: None) -> None:
    ops, _ = compile_and_compare(Gated(linear(8, hadamard=True), act), torch.randn(2, 3, 32))
    assert ops == {"hadamard_quantize": 1, "scaled_matmul": 1}


def with_outliers(count: int) -> Any:
    down = linear(8, hadamard=True)
    down.outlier_index, down.outlier_weight = torch.arange(count), torch.randn(8, count)
    return down


def test_fuse_hadamard_quantize__a_few_channels_beside_the_codes(without_inductor: None) -> None:
    ops, misses = compile_and_compare(Gated(with_outliers(2)), torch.randn(2, 3, 32))
    assert ops == {"hadamard_quantize_kept": 1, "scaled_matmul_epilogue": 1}
    assert not misses["fuse_hadamard_quantize"]


def test_fuse_hadamard_quantize__a_few_channels_through_inductor() -> None:
    model, x = Gated(with_outliers(2)), torch.randn(2, 3, 32)
    with torch.no_grad():
        difference = torch.compile(model, backend="mmqc", fullgraph=True)(x) - model(x)
    assert difference.abs().max() <= 127 * 0.05 + 1e-3, "a code or two may fall on the other side"


@pytest.mark.parametrize(("axis", "index"), [(0, torch.int64), (-2, torch.int64), (-1, torch.int32)])
def test_fuse_hadamard_quantize__hadamard_that_is_read_otherwise(axis: int, index: torch.dtype, without_inductor: None) -> None:
    class Rows(Gated):
        def forward(self, x: torch.Tensor) -> Any:
            chosen = torch.tensor([1, 0], dtype=index)
            y = self.down.rotated(x)
            codes = torch.ops.mmqc.quantize(y, self.down.input_scale, None, 8)
            return codes, y.index_select(axis, chosen)

    _, misses = compile_and_compare(Rows(linear(8, hadamard=True)), torch.randn(2, 3, 32))
    assert "2 operations read" in misses["fuse_hadamard_quantize"][0]


def test_fuse_hadamard_quantize__hadamard_that_something_else_reads(
    without_inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hadamard_quantize_kept, "MOST", 1)
    ops, misses = compile_and_compare(Gated(with_outliers(2)), torch.randn(2, 3, 32))
    assert ops == {"hadamard": 1, "quantize": 1, "scaled_matmul_epilogue": 1}
    assert "2 operations read" in misses["fuse_hadamard_quantize"][0]


@pytest.mark.parametrize("act", [F.silu, F.gelu])
def test_fuse_hadamard_quantize__hadamard_through_inductor(act: Any) -> None:
    model, x = Gated(linear(8, hadamard=True), act), torch.randn(2, 3, 32)
    with torch.no_grad():
        difference = torch.compile(model, backend="mmqc", fullgraph=True)(x) - model(x)
    assert difference.abs().max() <= 127 * 0.05 + 1e-3, "a code or two may fall on the other side"
    assert (difference.abs() > 1e-3).float().mean() < 0.2
