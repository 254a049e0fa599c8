import pytest
import torch
from fusion_cases import linear as static
from tolerance import assert_close
from torch.nn import functional as F

from mmqc.ops.pack import pack
from mmqc.ops.straight_through import gradient_of, linear

op = torch.ops.mmqc.straight_through


def case(widths: list[int], bits: list[int], groups: int, order: bool, n: int = 5) -> tuple[list, torch.Tensor]:
    """(the op's operands behind x and y, W [n, K] in float64 by hand)."""
    g = torch.Generator().manual_seed(len(widths) + groups)
    codes = [
        torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, w), generator=g, dtype=torch.int8)
        for w, b in zip(widths, bits, strict=True)
    ]
    shapes = [(n, -(-w // groups)) if groups else (n,) for w in widths]
    scales = [torch.rand(shape, generator=g) + 0.1 for shape in shapes]
    spread = [s.repeat_interleave(groups, 1)[:, :w] if groups else s[:, None] for s, w in zip(scales, widths, strict=True)]
    w = torch.cat([c.double() * s.double() for c, s in zip(codes, spread, strict=True)], 1)
    places = torch.randperm(sum(widths), generator=g) if order else None
    if places is not None:
        w = torch.empty_like(w).index_copy(1, places, w)
    stored = [pack(c, b) if b < 8 else c for c, b in zip(codes, bits, strict=True)]
    return [stored, scales, widths, bits, groups, places], w


@pytest.mark.parametrize(
    ("widths", "bits", "groups", "order"),
    [([12], [8], 0, False), ([13], [4], 0, False), ([12], [4], 4, False), ([10], [8], 4, False), ([6, 7], [4, 8], 0, True)],
)
def test_straight_through__gradient_is_the_float_linears(widths, bits, groups, order) -> None:
    operands, w = case(widths, bits, groups, order)
    x = torch.randn(3, 2, sum(widths), requires_grad=True)
    y = torch.randn(3, 2, 5)
    out = op(x, y, *operands)
    assert torch.equal(out, y)
    upstream = torch.randn(3, 2, 5)
    (grad,) = torch.autograd.grad(out, x, upstream)
    z = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(z, w), z, upstream.double())
    assert_close(grad, expected, torch.float32)
    torch.library.opcheck(op.default, (x, y, *operands))


def test_straight_through__no_op_where_nobody_wants_a_gradient() -> None:
    operands, _ = case([12], [8], 0, False)
    x, y = torch.randn(3, 12), torch.randn(3, 5)
    assert linear(x, y, *operands) is y
    with torch.no_grad():
        assert linear(x.requires_grad_(), y, *operands) is y
    assert linear(x, y, *operands).requires_grad


def test_straight_through__refuses_parts_that_are_not_the_inputs() -> None:
    operands, _ = case([12], [8], 0, False)
    with pytest.raises(ValueError, match=r"are no parts of 13 channels"):
        op(torch.randn(3, 13), torch.randn(3, 5), *operands)
    with pytest.raises(ValueError, match=r"y has shape \[3, 5\], not \[4, 5\]"):
        op(torch.randn(3, 12), torch.randn(4, 5), *operands)


def test_straight_through__compiled_gradients_are_the_eager_ones() -> None:
    model = torch.nn.Sequential(static(64), torch.nn.SiLU(), torch.nn.Linear(64, 32), static(48, hadamard=True))
    compiled = torch.compile(model, backend="mmqc")
    x, upstream = torch.randn(5, 32, requires_grad=True), torch.randn(5, 48)
    (expected,) = torch.autograd.grad(model(x), x, upstream)
    (grad,) = torch.autograd.grad(compiled(x), x, upstream)
    assert expected.abs().max() > 0
    assert_close(grad, expected)


def test_gradient_of__has_the_value_of_one_and_the_gradient_of_the_other() -> None:
    x = torch.tensor([1.3, -0.2], requires_grad=True)
    y = gradient_of(x.round(), 3 * x)
    assert torch.equal(y, torch.tensor([1.0, 0.0]))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.tensor([3.0, 3.0]))
