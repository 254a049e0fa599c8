"""The gate, the transform and the per-token quantization in one op."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mmqc.ops  # noqa: F401
from mmqc.ops.hadamard_matrix import hadamard_factors

ops = torch.ops.mmqc


def operands(gated: bool) -> tuple:
    x, up = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    return x, up if gated else None, [f.float() for f in hadamard_factors(24)], 4


@pytest.mark.parametrize("gated", [False, True])
def test_hadamard_quantize_per_token__is_its_parts(gated: bool) -> None:
    x, up, factors, bits = operands(gated)
    h: Tensor = x if up is None else F.silu(x) * up
    want = ops.quantize_per_token(ops.hadamard(h, factors), None, [24], [bits])
    got = ops.hadamard_quantize_per_token(x, up, factors, bits)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("gated", [False, True])
def test_hadamard_quantize_per_token__opcheck(gated: bool) -> None:
    torch.library.opcheck(ops.hadamard_quantize_per_token.default, operands(gated))


def test_hadamard_quantize_per_token__checks() -> None:
    x, up, factors, bits = operands(True)
    with pytest.raises(ValueError, match="one shape"):
        ops.hadamard_quantize_per_token(x, up[:, :1], factors, bits)
    with pytest.raises(ValueError, match="span a width"):
        ops.hadamard_quantize_per_token(x, up, factors[:-1], bits)
