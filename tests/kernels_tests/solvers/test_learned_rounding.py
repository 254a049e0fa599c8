"""The kernels against the ops' plain-torch references: every number equal, but for the order of a sum."""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import learned_round, learned_round_gradients

kernel = pytest.importorskip("mmqc.kernels.solvers.learned_rounding")
SHAPES = [(1, 1), (5, 3), (37, 64), (70, 33), (2, 2048), (3, 2500)]


def problem(m, g, bits, asymmetric, device):
    r = torch.Generator().manual_seed(m + g)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (m, g), generator=r, dtype=torch.int8)
    offset = torch.randn(m, g, generator=r) * 2
    offset[::2] = offset[::2].mul(2).round() / 2  # ties, and the border of the grid
    step = torch.rand(m, 1, generator=r) + 0.5
    zero = torch.randint(-2, 3, (m, 1), generator=r).float() if asymmetric else None
    return [None if t is None else t.to(device) for t in (codes, offset, step, zero, torch.randn(m, g, generator=r))]


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_learned_round__equals_the_reference(shape, bits, asymmetric, device):
    codes, offset, step, zero, of_weight = problem(*shape, bits, asymmetric, device)
    for dtype in (torch.float32, torch.float16 if device.type == "cpu" else torch.bfloat16):  # the interpreter cuts bfloat16 off
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        weight = kernel.learned_round(codes, offset, step, zero, bits, dtype, out)
        assert torch.equal(weight, learned_round.reference(codes, offset, step, zero, bits, dtype))
    out = torch.full(shape, torch.nan, device=device), torch.full((shape[0], 1), torch.nan, device=device)
    of_offset, of_stretch = kernel.learned_round_gradients(codes, offset, step, zero, of_weight, bits, out)
    wanted = learned_round_gradients.reference(codes, offset, step, zero, of_weight, bits)
    assert torch.equal(of_offset, wanted[0])
    assert_close(of_stretch, wanted[1])


def test_learned_round__refuses_what_is_not_contiguous_and_takes_no_groups(device):
    codes, offset, step, _, of_weight = problem(6, 8, 2, False, device)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.learned_round(codes, offset.T.contiguous().T, step, None, 2, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.learned_round_gradients(codes, offset, step, None, of_weight.T.contiguous().T, 2)
    none = [t[:0] for t in (codes, offset, step)]
    assert kernel.learned_round(*none, None, 2, torch.float32).shape == (0, 8)
    assert [list(t.shape) for t in kernel.learned_round_gradients(*none, None, of_weight[:0], 2)] == [[0, 8], [0, 1]]
