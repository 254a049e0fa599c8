"""The ops on CUDA: the kernels behind them compute what the references do, for any leading axes, and say what they cannot."""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import scaled_matmul as scaled_op
from mmqc.ops import weight_only_matmul as weight_only_op
from mmqc.ops.pack import pack_int4

on_cuda = pytest.importorskip("mmqc.kernels.on_cuda")
N, K = 40, 96


def weight(bits, device):
    low = -(2 ** (bits - 1))
    codes = torch.randint(low, -low, (N, K), dtype=torch.int8, device=device)
    return pack_int4(codes) if bits == 4 else codes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7,), (2, 1, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_scaled_matmul__any_leading_axes(shape, bits, masked, device):
    x = torch.randint(-128, 128, (*shape, K), dtype=torch.int8, device=device)
    x_scale = torch.rand(2 if masked else 1, device=device) * 0.01
    visual = torch.rand(shape[-1], device=device) < 0.5 if masked else None  # broadcast over the batch
    args = (x, weight(bits, device), x_scale, torch.rand(N, device=device), torch.randn(N, device=device), visual, bits)
    assert on_cuda.why_not_scaled(args[0], args[1], args[3], args[4], bits, torch.float32) is None
    assert_close(on_cuda.scaled_matmul(*args, torch.float32), scaled_op.reference(*args, torch.float32))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7,)])
@pytest.mark.parametrize("group", [0, 32])
def test_weight_only_matmul__any_leading_axes(shape, bits, group, device):
    x = torch.randn(*shape, K, device=device, dtype=torch.float16)
    scale = torch.rand(*((N, K // group) if group else (N,)), device=device)
    args = (x, weight(bits, device), scale, torch.randn(N, device=device), bits, group)
    assert on_cuda.why_not_weight_only(*args) is None
    assert_close(on_cuda.weight_only_matmul(*args), weight_only_op.reference(*args))


def test_scaled_matmul__float64_goes_to_the_reference(device):
    x = torch.randint(-128, 128, (3, K), dtype=torch.int8, device=device)
    args = (
        x,
        weight(8, device),
        torch.ones(1, device=device),
        torch.rand(N, device=device),
        None,
        None,
        8,
        torch.float64,
    )
    assert "out_dtype is one of" in on_cuda.why_not_scaled(args[0], args[1], args[3], None, 8, torch.float64)
    assert torch.equal(on_cuda.scaled_matmul(*args), scaled_op.reference(*args))


def test_weight_only_matmul__float32_goes_to_the_reference(device):
    args = (torch.randn(3, K, device=device), weight(8, device), torch.rand(N, device=device), None, 8, 0)
    assert on_cuda.why_not_weight_only(*args) == "float32 activations are multiplied in float32"
    assert torch.equal(on_cuda.weight_only_matmul(*args), weight_only_op.reference(*args))
