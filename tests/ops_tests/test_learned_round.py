"""The weight and its gradients against autograd through the same formula."""

import pytest
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401

round_op = torch.ops.mmqc.learned_round.default
gradients_op = torch.ops.mmqc.learned_round_gradients.default


def problem(m: int = 7, g: int = 12, bits: int = 2, asymmetric: bool = True):
    r = torch.Generator().manual_seed(m * g + bits)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = torch.randint(low, high + 1, (m, g), generator=r, dtype=torch.int8)
    offset, step = torch.randn(m, g, generator=r), torch.rand(m, 1, generator=r) + 0.5
    zero = torch.randint(-2, 3, (m, 1), generator=r).float() if asymmetric else None
    return codes, offset, step, zero, torch.randn(m, g, generator=r)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_learned_round__gradients_are_autograds(bits, asymmetric):
    codes, offset, step, zero, of_weight = problem(bits=bits, asymmetric=asymmetric)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    v, t = offset.clone().requires_grad_(), torch.zeros_like(step, requires_grad=True)
    wide = (codes + v).clamp(low - 0.5, high + 0.5)
    q = wide + (wide.round().clamp(low, high) - wide).detach()
    weight = (q - (0 if zero is None else zero)) * step * t.exp()
    weight.backward(of_weight)
    assert torch.equal(round_op(codes, offset, step, zero, bits, torch.float32), weight.detach())
    assert round_op(codes, offset, step, zero, bits, torch.bfloat16).equal(weight.detach().bfloat16())
    of_offset, of_stretch = gradients_op(codes, offset, step, zero, of_weight, bits)
    assert torch.equal(of_offset, v.grad)
    assert_close(of_stretch, t.grad)


def test_learned_round__opcheck():
    codes, offset, step, zero, of_weight = problem()
    for z in (None, zero):
        torch.library.opcheck(round_op, (codes, offset, step, z, 2, torch.float32))
        torch.library.opcheck(gradients_op, (codes, offset, step, z, of_weight, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": torch.zeros(7, 3)}, r"are \[M, g\]"),
        ({"step": torch.ones(7)}, r"are \[M, g\]"),
        ({"codes": torch.zeros(7, 12)}, "codes are int8"),
        ({"zero": torch.ones(7, 1, dtype=torch.int8)}, "everything else is float32"),
        ({"bits": 1}, "2 to 8"),
    ],
)
def test_learned_round__refuses(change, message):
    codes, offset, step, zero, of_weight = problem()
    given = {"codes": codes, "offset": offset, "step": step, "zero": zero, "of_weight": of_weight, "bits": 2} | change
    with pytest.raises(ValueError, match=message):
        gradients_op(*given.values())
    with pytest.raises(ValueError, match=message):
        round_op(*(v for k, v in given.items() if k != "of_weight"), torch.float32)
