"""The kernel against the op's plain-torch reference; numbers are chosen so that no sum rounds, and then at random."""

import pytest
import torch

from mmqc.ops import gptq_block as op

kernel = pytest.importorskip("mmqc.kernels.solvers.gptq_block")
SHAPES = [(1, 1), (3, 5), (16, 33), (17, 40)]
LARGE = [pytest.param((128, 40), marks=pytest.mark.slow), pytest.param((37, 100), marks=pytest.mark.slow)]


def problem(size, n, device, exact):
    g = torch.Generator().manual_seed(size + n)
    w = torch.randint(-60, 61, (size, n), generator=g).float() / 8
    if exact:  # all intermediate values are multiples of 2^-4 and small
        near = torch.rand(size, size, generator=g) < 2 / size
        u = torch.eye(size) + torch.triu(near.float(), 1) * 0.5
        scale = torch.ones(size, n)
    else:
        u = torch.triu(torch.randn(size, size, generator=g) * 0.2, 1) + torch.diag(torch.rand(size, generator=g) + 0.5)
        w, scale = w + torch.randn(size, n, generator=g), torch.rand(size, n, generator=g) + 0.5
    zero = torch.randint(-3, 4, (size, n), generator=g).float()
    between = (zero + torch.randint(0, 8, (size, n), generator=g) / 8).half().float()
    return [t.to(device) for t in (w, u, scale, zero, between)]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("asymmetric", [False, True, "between"])
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_gptq_block__equals_the_reference(shape, asymmetric, bits, device):
    w, u, scale, zero, between = problem(*shape, device, exact=True)
    zero = between if asymmetric == "between" else zero if asymmetric else None
    out = torch.full(shape, 77, dtype=torch.int8, device=device), torch.full(shape, torch.nan, device=device)
    codes, errors = kernel.gptq_block(w, u, scale, zero, bits, out)
    expected = op.reference(w, u, scale, zero, bits)
    assert torch.equal(codes, expected[0])
    assert torch.equal(errors, expected[1])


@pytest.mark.parametrize("shape", [(17, 40), (128, 3)])
def test_gptq_block__floats_of_4_bits(shape, device):
    w, u, scale, *_ = problem(*shape, device, exact=True)
    codes, errors = kernel.gptq_block(w, u, scale, None, 4, float4=True)
    expected = op.reference(w, u, scale, None, 4, float4=True)
    assert {*codes.abs().unique().tolist()} <= {0, 1, 2, 3, 4, 6, 8, 12}
    assert torch.equal(codes, expected[0])
    assert torch.equal(errors, expected[1])


@pytest.mark.parametrize("asymmetric", [False, True, "between"])
def test_gptq_block__random_numbers_agree_but_for_ties(asymmetric, device):
    w, u, scale, zero, between = problem(24, 70, device, exact=False)
    zero = between if asymmetric == "between" else zero if asymmetric else None
    codes, _ = kernel.gptq_block(w, u, scale, zero, 4)
    expected, _ = op.reference(w, u, scale, zero, 4)
    assert (codes != expected).any(0).float().mean() <= 2 / 70  # columns: one other code changes all that follow it


def test_gptq_block__one_scale_for_all_channels_and_a_part_of_a_larger_matrix(device):
    w, u, scale, *_ = problem(17, 64, device, exact=True)
    wide = torch.full((40, 40), torch.nan, device=device)
    wide[5:22, 5:22] = u
    row = scale[0] * 2
    codes, _ = kernel.gptq_block(w, wide[5:22, 5:22], row.expand(17, -1), None, 4)
    assert torch.equal(codes, op.reference(w, u, row.expand(17, -1), None, 4)[0])


def test_gptq_block__says_what_it_cannot_take(device):
    w, u, scale, *_ = problem(17, 64, device, exact=True)
    assert "float32" in kernel.supports(w.double(), u.double(), scale.double(), None)
    assert "at most 128" in kernel.supports(w[:1].expand(200, -1), u, scale, None)
    with pytest.raises(ValueError, match="contiguous along"):
        kernel.gptq_block(w.T.contiguous().T, u, scale, None, 4)
