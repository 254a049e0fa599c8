"""One quantization for the linears that read one tensor."""

import torch
from fusion_cases import Readers, compile_and_compare, linear


def test_share_quantize__equal_scales_share_one_quantization_and_one_product(without_inductor: None) -> None:
    ops, _ = compile_and_compare(Readers(linear(8), linear(24), linear(40)), torch.randn(2, 5, 32))
    assert ops == {"quantize": 2, "scaled_matmuls": 1, "scaled_matmul": 1}


def test_share_quantize__other_scale_or_no_bias_stays_apart(without_inductor: None) -> None:
    model = Readers(linear(8), linear(16, 0.06), linear(24, bias=False))
    ops, misses = compile_and_compare(model, torch.randn(3, 32))
    assert ops == {"quantize": 3, "scaled_matmul": 4}
    assert any("its scale differs" in miss for miss in misses["share_quantize"])
