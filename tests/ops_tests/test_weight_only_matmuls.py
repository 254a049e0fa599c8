"""Several weight-only linears of one input."""

import pytest
import torch

import mmqc.ops  # noqa: F401

ops = torch.ops.mmqc
WIDTHS = (5, 12, 3)


def operands(bits: int, group: int) -> tuple:
    x = torch.randn(2, 4, 10)
    w = [
        torch.randint(0, 256, (n, 5), dtype=torch.uint8) if bits == 4 else torch.randint(-128, 128, (n, 10), dtype=torch.int8)
        for n in WIDTHS
    ]
    scales = [torch.rand(n, -(-10 // group)) if group else torch.rand(n) for n in WIDTHS]
    return x, w, scales, [torch.randn(n) for n in WIDTHS], bits, group


@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only_matmuls__are_the_single_ones(bits: int, group: int) -> None:
    x, w, scales, bias, *rest = operands(bits, group)
    for i, y in enumerate(ops.weight_only_matmuls(x, w, scales, bias, *rest)):
        assert torch.equal(y, ops.weight_only_matmul(x, w[i], scales[i], bias[i], *rest))


def test_weight_only_matmuls__opcheck() -> None:
    torch.library.opcheck(ops.weight_only_matmuls.default, operands(4, 4))


def test_weight_only_matmuls__checks_every_linear() -> None:
    x, w, scales, *rest = operands(8, 4)
    with pytest.raises(ValueError, match="w_scale for group_size 4"):
        ops.weight_only_matmuls(x, w, [scales[0], scales[1], torch.rand(3)], *rest)
