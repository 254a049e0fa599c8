"""One operation for the linears that read one tensor."""

import pytest
import torch
from fusion_cases import Readers, compile_and_compare, linear

from mmqc.compiler.record import collect_records
from mmqc.nn.linear import QuantLinear
from mmqc.solvers import Quantized


def test_fuse_matmuls__weight_only(without_inductor: None) -> None:
    ops, _ = compile_and_compare(Readers(*(linear(n, static=False) for n in (8, 24))), torch.randn(2, 5, 32))
    assert ops == {"weight_only_matmuls": 1, "weight_only_matmul": 1}


def test_fuse_matmuls__more_linears_than_a_kernel_takes(without_inductor: None) -> None:
    ops, _ = compile_and_compare(Readers(*(linear(n) for n in (8, 16, 24, 32, 40))), torch.randn(3, 32))
    assert ops == {"quantize": 2, "scaled_matmuls": 2, "scaled_matmul": 1}


@pytest.mark.parametrize("amplifier", [0, 512])
def test_fuse_matmuls__group_scales(without_inductor: None, amplifier: int) -> None:
    def grouped(width: int, amplifier: int) -> QuantLinear:
        codes, scale = torch.randint(-8, 8, (width, 32), dtype=torch.int8), torch.randint(1, 90, (width, 4)) / 512
        quantized = Quantized(codes, scale, group_size=8, amplifier=amplifier)
        return QuantLinear.from_parts(quantized, weight_bits=4, activation_bits=8, input_scale=torch.tensor([0.05]))

    model = Readers(grouped(8, amplifier), grouped(24, amplifier), grouped(16, 512 - amplifier), linear(8, bias=False))
    ops, _ = compile_and_compare(model, torch.randn(2, 5, 32))
    assert ops == {"quantize": 2, "scaled_matmuls": 1, "scaled_matmul": 3}


def test_fuse_matmuls__gradients_keep_the_single_ops(without_inductor: None) -> None:
    model, x = Readers(linear(8, static=False), linear(16, static=False)), torch.randn(3, 32, requires_grad=True)
    with collect_records() as records:
        got = torch.compile(model, backend="mmqc", fullgraph=True)(x)
    assert records[0].ops == {"weight_only_matmul": 3}
    torch.testing.assert_close(got, model(x), rtol=0, atol=0)


def test_fuse_matmuls__zero_points_keep_the_single_ops(without_inductor: None) -> None:
    readers = [linear(n, static=False) for n in (8, 16)]
    for reader in readers:
        reader.weight_zero = torch.ones_like(reader.weight_scale, dtype=torch.int8)
    ops, misses = compile_and_compare(Readers(*readers), torch.randn(2, 5, 32))
    assert ops == {"weight_only_matmul": 3}
    assert [m.partition(": ")[2] for m in misses["fuse_matmuls"]] == ["the fused form has no zero points"]
