"""The weight against its formula in float64."""

import pytest
import torch
from learned import problem, refused

import mmqc.ops  # noqa: F401

op = torch.ops.mmqc.learned_round.default


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_learned_round__rounds_and_scales(bits, asymmetric):
    codes, offset, step, zero, _ = problem(bits=bits, asymmetric=asymmetric)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    q = (codes.double() + offset).round().clamp(low, high) - (0 if zero is None else zero)
    wanted = (q * step.double()).float()  # of a product one rounding
    assert torch.equal(op(codes, offset, step, zero, bits, torch.float32), wanted)
    assert torch.equal(op(codes, offset, step, zero, bits, torch.bfloat16), wanted.bfloat16())


def test_learned_round__opcheck():
    codes, offset, step, zero, _ = problem()
    for z in (None, zero):
        torch.library.opcheck(op, (codes, offset, step, z, 2, torch.float32))


@pytest.mark.parametrize(("change", "message"), refused())
def test_learned_round__refuses(change, message):
    codes, offset, step, zero, _ = problem()
    given = {"codes": codes, "offset": offset, "step": step, "zero": zero, "bits": 2} | change
    with pytest.raises(ValueError, match=message):
        op(*given.values(), torch.float32)
