"""The gradients against autograd through the weight's formula."""

import pytest
import torch
from learned import problem, refused
from tolerance import assert_close

import mmqc.ops  # noqa: F401

op = torch.ops.mmqc.learned_round_gradients.default


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_learned_round_gradients__are_autograds(bits, asymmetric):
    codes, offset, step, zero, of_weight = problem(bits=bits, asymmetric=asymmetric)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    v, t = offset.clone().requires_grad_(), torch.zeros_like(step, requires_grad=True)
    wide = (codes + v).clamp(low - 0.5, high + 0.5)
    q = wide + (wide.round().clamp(low, high) - wide).detach()
    ((q - (0 if zero is None else zero)) * step * t.exp()).backward(of_weight)
    of_offset, of_stretch = op(codes, offset, step, zero, of_weight, bits)
    assert torch.equal(of_offset, v.grad)
    assert_close(of_stretch, t.grad)
    assert (of_offset == 0).any()


def test_learned_round_gradients__opcheck():
    codes, offset, step, zero, of_weight = problem()
    for z in (None, zero):
        torch.library.opcheck(op, (codes, offset, step, z, of_weight, 2))


@pytest.mark.parametrize(("change", "message"), [*refused(), ({"of_weight": torch.zeros(7, 3)}, r"are \[M, g\]")])
def test_learned_round_gradients__refuses(change, message):
    codes, offset, step, zero, of_weight = problem()
    given = {"codes": codes, "offset": offset, "step": step, "zero": zero, "of_weight": of_weight, "bits": 2} | change
    with pytest.raises(ValueError, match=message):
        op(*given.values())
