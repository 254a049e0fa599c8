"""Floats of 4 bits: codes and scales against compressed-tensors' and torch's own, and the op in eager mode and compiled."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from tolerance import assert_close

import mmqc.lowering.float4_matmul  # noqa: F401
from mmqc.ops.float4 import HALVES, pack_float4, read_scale, round_float4, store_scale, unpack_float4
from mmqc.ops.pack import unpack
from mmqc.specs import BLOCKS

op = torch.ops.mmqc.float4_matmul


def operands(n, k, form):
    """(packed codes, stored scales, divisor or None; the dense float64 weight)."""
    codes = torch.tensor(HALVES, dtype=torch.int8)[torch.randint(8, (n, k))] * (1 - 2 * torch.randint(2, (n, k))).to(torch.int8)
    scale = torch.randint(110, 126, (n, -(-k // BLOCKS[form])), dtype=torch.uint8)
    divisor = torch.tensor([300.0]) if form == "nvfp4" else None
    steps = torch.exp2(scale.double() - 127) if form == "mxfp4" else (scale.view(torch.float8_e4m3fn).float() / 300).double()
    dense = codes.double() / 2 * steps.repeat_interleave(BLOCKS[form], 1)[:, :k]
    return (pack_float4(codes), scale, divisor), dense


def test_round_float4__is_compressed_tensors_ties_too():
    ties = torch.arange(-48, 49) / 8
    x = torch.cat([ties, torch.randn(2000) * 3])
    assert torch.equal(round_float4(2 * x) / 2, FP4_E2M1_DATA.cast_to_fp4(x.clamp(-6, 6)))


@pytest.mark.parametrize("k", [1, 6, 31])
def test_pack_float4__round_trip_and_the_bits_of_e2m1(k):
    (packed, _, _), dense = operands(5, k, "mxfp4")
    codes = unpack_float4(packed, k)
    assert torch.equal(pack_float4(codes), packed)
    assert torch.equal(codes.sign(), dense.sign())
    even = k - k % 2
    theirs = pack_fp4_to_uint8(codes[:, :even].float() / 2)
    mine = (unpack(packed, k, 4) + 8)[:, :even].to(torch.uint8)
    assert torch.equal(mine[:, ::2] | mine[:, 1::2] << 4, theirs)
    assert torch.equal(unpack_fp4_from_uint8(theirs, 5, even, torch.float32) * 2, codes[:, :even])


def test_scales__every_byte_and_the_nearest_of_any_number():
    powers = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(read_scale(powers, "mxfp4"), powers.view(torch.float8_e8m0fnu).float())
    assert torch.equal(store_scale(read_scale(powers, "mxfp4"), "mxfp4"), powers)
    assert store_scale(torch.tensor([1.49, 1.51, 0.0, 1e-45, 3e38]), "mxfp4").tolist() == [127, 128, 1, 1, 254]
    numbers = torch.arange(1, 127, dtype=torch.uint8)
    assert torch.equal(store_scale(read_scale(numbers, "nvfp4"), "nvfp4"), numbers)
    assert read_scale(store_scale(torch.tensor([0.0, 1e9, 0.3]), "nvfp4"), "nvfp4").tolist() == [2**-9, 448, 0.3125]


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(17, 63), (5, 96)])
def test_float4_matmul__is_the_dequantized_linear(form, n, k):
    weight, dense = operands(n, k, form)
    x, bias = torch.randn(2, 3, k, dtype=torch.float64), torch.randn(n)
    assert_close(op(x, *weight, bias.double(), form), x @ dense.T + bias.double())
    assert_close(op(x.float(), *weight, None, form), x @ dense.T)
    torch.library.opcheck(op.default, (x.float(), *weight, bias, form))


@pytest.mark.parametrize(("form", "n", "k"), [("mxfp4", 7, 70), ("nvfp4", 20, 64)])
def test_float4_matmul__compiled(form, n, k):
    weight, _ = operands(n, k, form)
    x, bias = torch.randn(3, k), torch.randn(n)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: op(*given).relu(), backend="mmqc", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(x, *weight, bias, form), op(x, *weight, bias, form).relu())


def test_float4_matmul__gradient_and_refusals():
    weight, _ = operands(5, 40, "nvfp4")
    x, bias = torch.randn(2, 40, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: op(x, *weight, b, "nvfp4"), (x, bias))
    with pytest.raises(ValueError, match=r"w_scale of mxfp4 for inputs of width 40 is torch.uint8 \[N, 2\]"):
        op(x, *weight, bias, "mxfp4")
    with pytest.raises(ValueError, match="nvfp4 has a divisor"):
        op(x, *weight[:2], None, bias, "nvfp4")
    with pytest.raises(ValueError, match="form = 'fp4'"):
        op(x, *weight, bias, "fp4")
