import pytest
import torch
from stacked_weights import COUNTS, offsets, stacked, with_zeros
from tolerance import assert_close

import mmqc.ops  # noqa: F401

grouped_matmul = torch.ops.mmqc.grouped_matmul


def row_by_row(x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The formula for one row at a time."""
    y = torch.zeros(len(x), dense.shape[1], dtype=torch.float64)
    for s in range(len(x)):
        for e in range(len(dense)):
            if bounds[e] <= s < bounds[e + 1]:
                y[s] = dense[e] @ x[s] + bias[e].double()
    return y


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 16), (8, 0), (8, 5), (3, 8), (2, 0)])
def test_grouped_matmul__of_floating_point_rows(counts: list[int], bits: int, group: int) -> None:
    w, scale, bias, dense = stacked(7, 35, bits, group)
    x = torch.randn(9, 35, dtype=torch.float64)
    y = grouped_matmul(x, w, scale, offsets(counts), bias.double(), None, bits, group, torch.float64)
    assert_close(y, row_by_row(x, dense, bias, offsets(counts)))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 16), (8, 0), (8, 5), (3, 8), (2, 0)])
@pytest.mark.parametrize("between", [False, True])
def test_grouped_matmul__with_zero_points(counts: list[int], bits: int, group: int, between: bool) -> None:
    w, scale, bias, dense, zero = with_zeros(7, 35, bits, group, between)
    x = torch.randn(9, 35, dtype=torch.float64)
    y = grouped_matmul(x, w, scale, offsets(counts), bias.double(), None, bits, group, torch.float64, zero)
    assert_close(y, row_by_row(x, dense, bias, offsets(counts)))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize(("bits", "group"), [(4, 0), (8, 0), (4, 16), (8, 5)])
def test_grouped_matmul__of_integer_rows_with_a_scale_each(counts: list[int], bits: int, group: int) -> None:
    w, scale, bias, dense = stacked(7, 35, bits, group)
    x, row_scale = torch.randint(-128, 128, (9, 35), dtype=torch.int8), torch.rand(9)
    y = grouped_matmul(x, w, scale, offsets(counts), bias, row_scale, bits, group, torch.float64)
    assert_close(y, row_by_row(x.double() * row_scale.double()[:, None], dense, bias, offsets(counts)))


def test_grouped_matmul__refuses_what_does_not_fit() -> None:
    w, scale, bias, _ = stacked(7, 35, 8, 0)
    x, bounds = torch.randn(9, 35), offsets([3, 0, 5, 1])
    for message, args in {
        "int8 rows come with row_scale": (x.to(torch.int8), w, scale, bounds, bias, None, 8, 0),
        "stored in 4 or 8 bits": (x.to(torch.int8), stacked(7, 35, 3, 0)[0], scale, bounds, bias, torch.rand(9), 3, 0),
        "one entry per row": (x.to(torch.int8), w, scale, bounds, bias, torch.rand(4), 8, 0),
        "w_scale for group_size 5": (x, w, scale, bounds, bias, None, 8, 5),
        "offsets is": (x, w, scale, bounds[1:], bias, None, 8, 0),
        "bias has shape": (x, w, scale, bounds, bias[:, 1:], None, 8, 0),
        "stacked weights": (x, w[0], scale[0], bounds, None, None, 8, 0),
        "8-bit weight": (x[:, 1:], w, scale, bounds, None, None, 8, 0),
    }.items():
        with pytest.raises(ValueError, match=message):
            grouped_matmul(*args, torch.float32)
    zero = torch.zeros(scale.shape, dtype=torch.int8)
    for message, operands, rows, z in (
        ("w_zero is int8", x, None, zero[:, 1:]),
        ("w_zero is int8", x, None, zero.int()),
        ("zero points go with floating-point rows", x.to(torch.int8), torch.rand(9), zero),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_matmul(operands, w, scale, bounds, bias, rows, 8, 0, torch.float32, z)


@pytest.mark.parametrize("zeros", [False, True])
def test_grouped_matmul__gradient(zeros: bool) -> None:
    w, scale, bias, _, zero = with_zeros(5, 6, 4, 3)
    bounds = offsets(COUNTS["none_for_some_rows"])
    x, bias = torch.randn(9, 6, dtype=torch.float64, requires_grad=True), bias.double().requires_grad_()
    function = lambda x, b: grouped_matmul(  # noqa: E731
        x, w, scale, bounds, b, None, 4, 3, torch.float64, zero if zeros else None
    )
    assert torch.autograd.gradcheck(function, (x, bias))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("integer", [False, True])
def test_grouped_matmul__opcheck(integer: bool, grad: bool) -> None:
    w, scale, bias, _ = stacked(5, 16, 4, 0)
    x = torch.randint(-9, 9, (9, 16), dtype=torch.int8) if integer else torch.randn(9, 16, requires_grad=grad)
    args = (x, w, scale, offsets([3, 0, 5, 1]), bias, torch.rand(9) if integer else None, 4, 0, torch.float32)
    torch.library.opcheck(grouped_matmul.default, args)


@pytest.mark.parametrize("grad", [False, True])
def test_grouped_matmul__opcheck_with_zero_points(grad: bool) -> None:
    w, scale, bias, _, zero = with_zeros(5, 16, 4, 8)
    x = torch.randn(9, 16, requires_grad=grad)
    args = (x, w, scale, offsets([3, 0, 5, 1]), bias, None, 4, 8, torch.float32, zero)
    torch.library.opcheck(grouped_matmul.default, args)
