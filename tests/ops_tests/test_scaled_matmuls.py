"""Several quantized linears of one input."""

import pytest
import torch

import mmqc.ops  # noqa: F401

ops = torch.ops.mmqc
WIDTHS = (5, 12, 3)


def operands(bits: int, biased: bool, masked: bool) -> tuple:
    x = torch.randint(-128, 128, (2, 4, 10), dtype=torch.int8)
    w = [
        torch.randint(0, 256, (n, 5), dtype=torch.uint8) if bits == 4 else torch.randint(-128, 128, (n, 10), dtype=torch.int8)
        for n in WIDTHS
    ]
    bias = [torch.randn(n) if biased else None for n in WIDTHS]
    visual = torch.rand(2, 4) > 0.5 if masked else None
    return x, w, torch.rand(1 + masked), [torch.rand(n) for n in WIDTHS], bias, visual, bits, torch.float32


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_scaled_matmuls__are_the_single_ones(bits: int, biased: bool, masked: bool) -> None:
    x, w, s_x, s_w, bias, visual, *rest = operands(bits, biased, masked)
    got = ops.scaled_matmuls(x, w, s_x, s_w, bias, visual, *rest)
    for i, y in enumerate(got):
        assert torch.equal(y, ops.scaled_matmul(x, w[i], s_x, s_w[i], bias[i], visual, *rest))


@pytest.mark.parametrize("integer", [False, True])
def test_scaled_matmuls__group_scales_are_the_single_ones(integer: bool) -> None:
    x, w, s_x, _, bias, visual, *rest = operands(4, True, True)
    t = [torch.randint(1, 99, (n, 3), dtype=torch.int32) for n in WIDTHS]
    s_w = [torch.rand(n) if integer else torch.rand(n, 3) for n in WIDTHS]
    args = (x, w, s_x, s_w, bias, visual, *rest, t if integer else None, 4)
    torch.library.opcheck(ops.scaled_matmuls.default, args)
    for i, y in enumerate(ops.scaled_matmuls(*args)):
        alone = (x, w[i], s_x, s_w[i], bias[i], visual, *rest, t[i] if integer else None, 4)
        assert torch.equal(y, ops.scaled_matmul(*alone))


def test_scaled_matmuls__opcheck() -> None:
    torch.library.opcheck(ops.scaled_matmuls.default, operands(4, True, True))


def test_scaled_matmuls__checks_every_linear() -> None:
    x, w, s_x, s_w, *rest = operands(8, False, False)
    with pytest.raises(ValueError, match="one entry per output"):
        ops.scaled_matmuls(x, w, s_x, [s_w[0], s_w[1], s_w[1]], *rest)
