"""Linears in several precisions: their products, to the bit, are those of floating point, which holds the sums of codes exactly."""

import pytest
import torch
from simulated import simulated_products

from mmqc.nn.mixed_linear import MixedLinear
from mmqc.ops.pack import pack


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mixed_linear__equals_simulated_products(dtype, bias):
    widths, stored, n = [37, 10], [4, 8], 13
    codes = [torch.randint(-8, 8, (n, widths[0])).to(torch.int8), torch.randint(-128, 128, (n, widths[1])).to(torch.int8)]
    linear = MixedLinear.from_stored(
        [pack(codes[0], 4), codes[1]],
        torch.rand(n, 2) + 0.01,
        torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1),
        widths=widths,
        stored=stored,
        activation=[4, 8],
        weight_bits=4,
        order=torch.randperm(47),
        bias=torch.randn(n, dtype=dtype) if bias else None,
        dtype=dtype,
    )
    x = torch.randn(2, 5, 47, dtype=dtype)
    expected = linear(x)
    with simulated_products() as called:
        assert torch.equal(linear(x), expected)
        assert called["mixed_matmul"].called
        linear.qweight.zero_()
        assert not torch.equal(linear(x), expected)
