"""The ops on CUDA: the kernels behind them compute what the references do, for any leading axes, and say what they cannot."""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import float4_matmul as float4_op
from mmqc.ops import scaled_matmul as scaled_op
from mmqc.ops import scaled_matmuls as scaled_matmuls_op
from mmqc.ops import token_matmul as token_op
from mmqc.ops import weight_only_matmul as weight_only_op
from mmqc.ops.pack import pack

on_cuda = pytest.importorskip("mmqc.kernels.on_cuda")
scaled = pytest.importorskip("mmqc.kernels.matmul.scaled_matmul")
MatmulConfig = pytest.importorskip("mmqc.kernels.matmul.configs").MatmulConfig
N, K = 40, 96


def weight(bits, device):
    low = -(2 ** (bits - 1))
    codes = torch.randint(low, -low, (N, K), dtype=torch.int8, device=device)
    return codes if bits == 8 else pack(codes, bits)


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


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7,), (2, 1, 3)])
def test_token_matmul__any_leading_axes(shape, bits, group, device):
    x = torch.randn(*shape, K, device=device) * torch.rand(*shape, 1, device=device)
    scale = torch.rand(*((N, K // group) if group else (N,)), device=device)
    args = (x, weight(bits, device), scale, torch.randn(N, device=device), bits, group)
    assert on_cuda.why_not_token(*args) is None
    assert_close(on_cuda.token_matmul(*args), token_op.reference(*args))


def test_token_matmul__what_has_no_kernel_is_the_reference(device):
    """Float8 inputs beside groups: the sum of a group is one of floats."""
    x, scale = torch.randn(3, K, device=device), torch.rand(N, K // 32, device=device)
    args = (x, weight(4, device), scale, None, 4, 32, torch.float8_e4m3fn)
    assert "float8" in on_cuda.why_not_token(*args)
    assert torch.equal(on_cuda.token_matmul(*args), token_op.reference(*args))
    args = (x.double(), weight(4, device), scale, None, 4, 32)
    assert "float64" in on_cuda.why_not_token(*args)
    assert torch.equal(on_cuda.token_matmul(*args), token_op.reference(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 16, 300, 4000])
def test_token_matmul__sizes_of_models(rows, bits, code):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.randn(rows, 3584, device="cuda").bfloat16()
    w = torch.randint(-8, 8, (1280, 3584), dtype=torch.int8, device="cuda")
    w = pack(w, 4) if bits == 4 else w.to(code)
    args = (x, w, torch.rand(1280, device="cuda"), torch.randn(1280, device="cuda").bfloat16(), bits, 0, code)
    assert on_cuda.why_not_token(*args) is None
    assert_close(on_cuda.token_matmul(*args), token_op.reference(*args))


def in_float64(x, w, scale, bias, *rest):
    """The op of float64 inputs: in x's dtype it would round the weight, which the kernel does not."""
    return weight_only_op.reference(x.double(), w, scale, bias, *rest)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7,)])
@pytest.mark.parametrize("group", [0, 32])
def test_weight_only_matmul__any_leading_axes(shape, bits, group, device):
    x = torch.randn(*shape, K, device=device, dtype=torch.float16)
    scale = torch.rand(*((N, K // group) if group else (N,)), device=device)
    args = (x, weight(bits, device), scale, torch.randn(N, device=device), bits, group)
    assert on_cuda.why_not_weight_only(*args) is None
    assert_close(on_cuda.weight_only_matmul(*args), in_float64(*args), x.dtype)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(3, 5), (7,)])
def test_float4_matmul__any_leading_axes(shape, form, device):
    x = torch.randn(*shape, K, device=device, dtype=torch.float16)
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(110, 120, (N, K // (32 if form == "mxfp4" else 16)), dtype=torch.uint8, device=device)
    args = (packed, scale, torch.full((1,), 300.0, device=device) if form == "nvfp4" else None, torch.randn(N, device=device), form)
    assert on_cuda.why_not_float4(x, *args) is None
    assert_close(on_cuda.float4_matmul(x, *args), float4_op.reference(x.double(), *args), x.dtype)
    assert "float32" in on_cuda.why_not_float4(x.float(), *args)
    assert torch.equal(on_cuda.float4_matmul(x.float(), *args), float4_op.reference(x.float(), *args))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("group", [0, 40])
@pytest.mark.parametrize("between", [False, True])
def test_weight_only_matmul__zero_points(between, bits, group, device):
    x = torch.randn(3, 5, K, device=device, dtype=torch.float16)
    scale = torch.rand(*((N, -(-K // group)) if group else (N,)), device=device)
    zero = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), scale.shape, dtype=torch.int8, device=device)
    zero = (zero + torch.rand(scale.shape, device=device)).half() if between else zero
    args = (x, weight(bits, device), scale, torch.randn(N, device=device), bits, group, zero)
    assert on_cuda.why_not_weight_only(*args) is None
    assert_close(on_cuda.weight_only_matmul(*args), in_float64(*args), x.dtype)
    wide = (x.float(), *args[1:])
    assert torch.equal(on_cuda.weight_only_matmul(*wide), weight_only_op.reference(*wide))


def test_scaled_matmul__float64_goes_to_the_reference(device):
    x = torch.randint(-128, 128, (3, K), dtype=torch.int8, device=device)
    args = (x, weight(8, device), torch.ones(1, device=device), torch.rand(N, device=device), None, None, 8, torch.float64)
    assert "out_dtype is one of" in on_cuda.why_not_scaled(args[0], args[1], args[3], None, 8, torch.float64)
    assert torch.equal(on_cuda.scaled_matmul(*args), scaled_op.reference(*args))


def test_weight_only_matmul__float32_goes_to_the_reference(device):
    args = (torch.randn(3, K, device=device), weight(8, device), torch.rand(N, device=device), None, 8, 0)
    assert on_cuda.why_not_weight_only(*args) == "float32 activations are multiplied in float32"
    assert torch.equal(on_cuda.weight_only_matmul(*args), weight_only_op.reference(*args))


SEVERAL = [(40, 16, 24), (33, 70)]  # widths of outputs


def several(widths, bits, device):
    low = -(2 ** (bits - 1))
    codes = [torch.randint(low, -low, (n, K), dtype=torch.int8, device=device) for n in widths]
    return [c if bits == 8 else pack(c, bits) for c in codes]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [(1,), (2, 9), (70,)])
@pytest.mark.parametrize("widths", SEVERAL)
@pytest.mark.parametrize("biased", ["all", "none", "one"])
def test_scaled_matmuls__equal_one_by_one(biased, widths, rows, bits, device):
    x = torch.randint(-128, 128, (*rows, K), dtype=torch.int8, device=device)
    bias = [torch.randn(n, device=device) if biased == "all" or (biased == "one" and not i) else None for i, n in enumerate(widths)]
    scales = [torch.rand(n, device=device) for n in widths]
    visual = torch.rand(rows[-1], device=device) < 0.5
    args = (x, several(widths, bits, device), torch.rand(2, device=device), scales, bias, visual, bits, torch.float32)
    want = scaled_matmuls_op.reference(*args)
    got = on_cuda.scaled_matmuls(*args)
    assert len(got) == len(want)
    for y, expected in zip(got, want, strict=True):
        assert_close(y, expected)
        assert y.is_contiguous()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("rows", [(1,), (2, 9), (70,)])
@pytest.mark.parametrize("widths", SEVERAL)
@pytest.mark.parametrize("group", [0, 32])
def test_weight_only_matmuls__equal_one_by_one(group, widths, rows, bits, device):
    x = torch.randn(*rows, K, device=device, dtype=torch.float16)
    scales = [torch.rand(*((n, K // group) if group else (n,)), device=device) for n in widths]
    bias = [torch.randn(n, device=device) for n in widths]
    w = several(widths, bits, device)
    got = on_cuda.weight_only_matmuls(x, w, scales, bias, bits, group)
    assert len(got) == len(widths)
    for y, *linear in zip(got, w, scales, bias, strict=True):
        assert_close(y, in_float64(x, *linear, bits, group), x.dtype)


def test_scaled_matmuls__split_along_k(device):
    """Parts of K, whose counters must be those of the launch and not of one linear."""
    widths, m, k = (48, 20, 100), 5, 1024
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    w = [torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device) for n in widths]
    scales = [torch.rand(n, device=device) for n in widths]
    config = MatmulConfig(16, 32, 64, 4, 2, split_k=4, variant="columns")
    one = torch.rand(1, device=device)
    for _ in range(2):
        got = [torch.full((m, n), float("nan"), device=device) for n in widths]
        linears = [scaled.Linear(*parts) for parts in zip(w, scales, [None] * 3, got, strict=True)]
        scaled.multiply(x, linears, scaled.row_scale(one, m), config=config)
        want = scaled_matmuls_op.reference(x, w, one, scales, [None] * 3, None, 8, torch.float32)
        for y, expected in zip(got, want, strict=True):
            assert_close(y, expected)
