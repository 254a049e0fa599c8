"""The gate, the transform and the quantization in one op."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mmqc.ops  # noqa: F401
from mmqc.ops.hadamard_matrix import hadamard_factors

ops = torch.ops.mmqc


def operands(gated: bool, masked: bool) -> tuple:
    x, up = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    factors = [f.float() for f in hadamard_factors(24)]
    visual = torch.rand(2, 3) > 0.5 if masked else None
    return x, up if gated else None, factors, 0.01 + torch.rand(1 + masked) * 0.05, visual, 8


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_hadamard_quantize__is_its_parts(gated: bool, masked: bool) -> None:
    x, up, factors, *rest = operands(gated, masked)
    h: Tensor = x if up is None else F.silu(x) * up
    assert torch.equal(ops.hadamard_quantize(x, up, factors, *rest), ops.quantize(ops.hadamard(h, factors), *rest))


@pytest.mark.parametrize("gated", [False, True])
def test_hadamard_quantize__opcheck(gated: bool) -> None:
    torch.library.opcheck(ops.hadamard_quantize.default, operands(gated, True))


def test_hadamard_quantize__checks() -> None:
    x, up, factors, scale, visual, bits = operands(True, False)
    with pytest.raises(ValueError, match="one shape"):
        ops.hadamard_quantize(x, up[:, :1], factors, scale, visual, bits)
    with pytest.raises(ValueError, match="span a width"):
        ops.hadamard_quantize(x, up, factors[:-1], scale, visual, bits)
