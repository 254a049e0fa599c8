import pytest
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401
from mmqc.ops.pack import pack

weight_only_matmul = torch.ops.mmqc.weight_only_matmul


def operands(n: int, k: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(stored weight, scale, bias, dense float64 weight)."""
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    scale = torch.rand(n, -(-k // group)) if group else torch.rand(n)
    spread = scale.repeat_interleave(group, 1)[:, :k] if group else scale[:, None]
    return codes if bits == 8 else pack(codes, bits), scale, torch.randn(n), codes.double() * spread.double()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(17, 63, 0), (63, 257, 32), (100, 100, 100), (1, 17, 4), (5, 256, 128)])
def test_weight_only_matmul__is_the_dequantized_linear(bits: int, n: int, k: int, group: int) -> None:
    stored, scale, bias, dense = operands(n, k, bits, group)
    x = torch.randn(2, 3, k, dtype=torch.float64)
    assert_close(weight_only_matmul(x, stored, scale, bias.double(), bits, group), x @ dense.T + bias.double())
    assert_close(weight_only_matmul(x.float(), stored, scale, None, bits, group), x @ dense.T)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(17, 63, 0), (63, 257, 32)])
def test_weight_only_matmul__zero_points(bits: int, n: int, k: int, group: int, between: bool) -> None:
    stored, scale, bias, dense = operands(n, k, bits, group)
    zero = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), scale.shape, dtype=torch.int8)
    zero = (zero + torch.rand(scale.shape)).half() if between else zero
    shift = (zero.double() * scale).repeat_interleave(group, 1)[:, :k] if group else (zero.double() * scale)[:, None]
    x = torch.randn(2, 3, k, dtype=torch.float64)
    want = x @ (dense - shift).T + bias.double()
    assert_close(weight_only_matmul(x, stored, scale, bias.double(), bits, group, zero), want)
    torch.library.opcheck(weight_only_matmul.default, (x.float(), stored, scale, bias, bits, group, zero))


def test_weight_only_matmul__refuses_zero_points_of_another_shape() -> None:
    stored, scale, _, _ = operands(5, 12, 8, 4)
    with pytest.raises(ValueError, match=r"w_zero is int8 or float16 \[5, 3\], not torch.int8 \[5\]"):
        weight_only_matmul(torch.randn(2, 12), stored, scale, None, 8, 4, torch.zeros(5, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"int8 or float16 \[5, 3\], not torch.float32"):
        weight_only_matmul(torch.randn(2, 12), stored, scale, None, 8, 4, torch.zeros(5, 3))


def test_weight_only_matmul__gradient() -> None:
    stored, scale, bias, _ = operands(5, 12, 4, 4)
    x, bias = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True), bias.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: weight_only_matmul(x, stored, scale, b, 4, 4), (x, bias))
    zero = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    for z in (zero, zero.half() + 0.3):
        assert torch.autograd.gradcheck(lambda x, b, z=z: weight_only_matmul(x, stored, scale, b, 4, 4, z), (x, bias))


def test_weight_only_matmul__refuses_scales_of_another_group() -> None:
    stored, scale, _, _ = operands(5, 12, 8, 4)
    with pytest.raises(ValueError, match="group_size 6"):
        weight_only_matmul(torch.randn(2, 12), stored, scale, None, 8, 6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 0), (8, 8), (3, 8), (2, 0)])
def test_weight_only_matmul__opcheck(bits: int, group: int, grad: bool) -> None:
    stored, scale, bias, _ = operands(5, 17, bits, group)
    x = torch.randn(2, 3, 17, requires_grad=grad)
    torch.library.opcheck(weight_only_matmul.default, (x, stored, scale, bias, bits, group))
