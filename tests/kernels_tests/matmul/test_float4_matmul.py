"""The Triton kernel of float4_matmul against the plain-torch op: both forms, blocks that fit the stretches and that do not.

Every code of kernels/shared/float4_codes.py beside scales of all sizes is in the weight that is written out.
"""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops.float4 import pack_float4
from mmqc.ops.float4_matmul import dequantize, reference
from mmqc.specs import BLOCKS

kernel = pytest.importorskip("mmqc.kernels.matmul.float4_matmul")
Config = pytest.importorskip("mmqc.kernels.matmul.configs").MatmulConfig

SMALL = {
    "whole": Config(16, 32, 32, 4, 2, group_m=2, variant="columns"),
    "split": Config(16, 16, 64, 4, 2, split_k=3, variant="columns"),
    "unpack": Config(16, 16, 32, 4, 2, variant="unpack"),
}
SHAPES = [(1, 33, 256), (17, 27, 192), (3, 19, 101), (4, 1, 1)]
HALVES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])


def weights(n, k, form, device):
    """Random codes of all kinds, scales over the range that products in fp16 hold, and for nvfp4 a divisor."""
    codes = HALVES[torch.randint(8, (n, k))] * (1 - 2 * torch.randint(2, (n, k)))
    low, high = (118, 130) if form == "mxfp4" else (0, 127)  # 127 bytes of float8: all that are finite and not negative
    scale = torch.randint(low, high, (n, -(-k // BLOCKS[form])), dtype=torch.uint8)
    divisor = torch.tensor([37.0]) if form == "nvfp4" else None
    parts = (pack_float4(codes.to(torch.int8)), scale, divisor)
    return [None if t is None else t.to(device) for t in parts]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("variant", SMALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_float4_matmul__equals_the_op(shape, variant, form, dtype, device):
    m, n, k = shape
    w = weights(n, k, form, device)
    x, bias = torch.randn(m, k, device=device).to(dtype), torch.randn(n, device=device)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    y = kernel.float4_matmul(x, *w, bias, form=form, out=out, config=SMALL[variant])
    assert y is out
    assert_close(y, reference(x.double(), *w, bias.double(), form), dtype)


@pytest.mark.parametrize("form", BLOCKS)
def test_write_out__every_code_is_exact_beside_scales_of_all_sizes(form, device):
    codes = torch.cat([HALVES, -HALVES]).to(torch.int8).repeat(256, BLOCKS[form] // 16)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    rows = slice(1, 250, 8) if form == "mxfp4" else slice(0, 127, 3)  # the scales whose products are finite and no subnormals
    packed, scale = pack_float4(codes[rows]).to(device), scale[rows].contiguous().to(device)
    divisor = torch.tensor([1.75], device=device) if form == "nvfp4" else None
    w = kernel.write_out(packed, scale, divisor, codes.shape[1], form, torch.float32)
    assert torch.equal(w, dequantize(packed, scale, divisor, codes.shape[1], form, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 16, 100, 600])
def test_float4_matmul__tiles_of_the_table(m, dtype, form, device):
    w = weights(200, 1024, form, device)
    x = torch.randn(m, 1024, device=device).to(dtype)
    assert_close(kernel.float4_matmul(x, *w, form=form), reference(x.double(), *w, None, form), dtype)


def test_supports__says_what_is_wrong(device):
    packed, scale, divisor = weights(8, 64, "nvfp4", device)
    x = torch.randn(2, 64, device=device)
    assert kernel.supports(x, packed, scale, divisor, None, "nvfp4") is None
    assert "divisor" in kernel.supports(x, packed, scale, None, None, "nvfp4")
    assert "w_scale" in kernel.supports(x, packed, scale, None, None, "mxfp4")
    with pytest.raises(ValueError, match="32 columns for inputs of width 32"):
        kernel.float4_matmul(x[:, :32], packed, scale, divisor, form="nvfp4")
