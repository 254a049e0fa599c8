"""A quantized linear, the activation, the gate and the next quantization in one op."""

import pytest
import torch
from torch.nn import functional as F

import mmqc.ops  # noqa: F401
from mmqc.ops.pack import pack_int4

ops = torch.ops.mmqc
ACTS = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def operands(bits: int, linears: int, masked: bool, n: int = 17, k: int = 33) -> tuple:
    top = 2 ** (bits - 1)
    x = torch.randint(-128, 128, (2, 4, k), dtype=torch.int8)
    w = [torch.randint(-top, top, (n, k), dtype=torch.int8) for _ in range(linears)]
    w = [pack_int4(v) for v in w] if bits == 4 else w
    scales = [torch.rand(n) * 0.01 for _ in w]
    bias = [torch.randn(n) for _ in w]
    return x, w, 0.05 + torch.rand(1 + masked), scales, bias, torch.rand(2, 4) > 0.5 if masked else None, bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("linears", [1, 2])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("act", ACTS)
def test_scaled_matmul_epilogue__is_its_parts(act: str, bits: int, linears: int, masked: bool, dtype: torch.dtype) -> None:
    x, w, s_x, s_w, bias, visual, _ = operands(bits, linears, masked)
    z = [ops.scaled_matmul(x, v, s_x, s, b, visual, bits, dtype) for v, s, b in zip(w, s_w, bias, strict=True)]
    h = ACTS[act](z[0])
    h = h * z[1] if linears == 2 else h
    args = (x, w, s_x, s_w, bias, visual, bits, dtype, act)
    assert torch.equal(ops.scaled_matmul_epilogue(*args), h)
    scale, mask = torch.rand(2) * 0.1, torch.rand(4) > 0.5
    got = ops.scaled_matmul_epilogue(*args, scale, mask, 6)
    assert torch.equal(got, ops.quantize(h, scale, mask, 6))
    assert got.dtype == torch.int8


@pytest.mark.parametrize("linears", [1, 2])
@pytest.mark.parametrize("next_scale", [None, torch.ones(1)])
def test_scaled_matmul_epilogue__opcheck(linears: int, next_scale: torch.Tensor | None) -> None:
    args = (*operands(4, linears, True), torch.float32, "silu", next_scale, None, 8)
    torch.library.opcheck(ops.scaled_matmul_epilogue.default, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_matmul_epilogue__a_term_of_low_rank(dtype: torch.dtype) -> None:
    x, w, s_x, s_w, bias, visual, bits = operands(8, 1, True)
    low_x, low_w = torch.randn(2, 4, 3, dtype=dtype), torch.randn(17, 3, dtype=dtype)
    args = (x, w, s_x, s_w, bias, visual, bits, dtype, "silu", torch.ones(1), None, 8, low_x, low_w)
    z = ops.scaled_matmul(x, w[0], s_x, s_w[0], bias[0], visual, bits, dtype)
    h = F.silu(z + F.linear(low_x, low_w))
    assert torch.equal(ops.scaled_matmul_epilogue(*args), ops.quantize(h, torch.ones(1), None, 8))
    torch.library.opcheck(ops.scaled_matmul_epilogue.default, args)


def test_scaled_matmul_epilogue__checks() -> None:
    x, w, s_x, s_w, bias, visual, bits = operands(8, 2, False)
    rest = (bias, visual, bits, torch.float32)
    with pytest.raises(ValueError, match="activation = 'swish': one of"):
        ops.scaled_matmul_epilogue(x, w, s_x, s_w, *rest, "swish")
    with pytest.raises(ValueError, match="gate and up of one shape"):
        ops.scaled_matmul_epilogue(x, [w[0], w[1][:3]], s_x, s_w, *rest, "silu")
    with pytest.raises(ValueError, match="gate and up of one shape"):
        ops.scaled_matmul_epilogue(x, w * 2, s_x, s_w * 2, bias * 2, visual, bits, torch.float32, "silu")
    codes = (torch.float32, "silu", None, None, 8)
    with pytest.raises(ValueError, match="is one linear's"):
        ops.scaled_matmul_epilogue(x, w, s_x, s_w, bias, visual, bits, *codes, x[..., :2].float(), torch.ones(17, 2))
    with pytest.raises(ValueError, match=r"x_S \[2, 4, 2\] and W_S \[17, 3\] do not fit"):
        ops.scaled_matmul_epilogue(x, w[:1], s_x, s_w[:1], bias[:1], visual, bits, *codes, x[..., :2].float(), torch.ones(17, 3))
    with pytest.raises(ValueError, match="needs visual mask"):
        ops.scaled_matmul_epilogue(x, w, s_x, s_w, *rest, "silu", torch.ones(2))
    with pytest.raises(ValueError, match="one entry per output"):
        ops.scaled_matmul_epilogue(x, w, s_x, [s_w[0], s_w[1][:2]], *rest, "silu")
