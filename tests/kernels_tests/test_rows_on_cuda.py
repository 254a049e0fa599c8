"""What is done to rows on CUDA: what the references compute, for any leading axes, by kernels or by the references themselves."""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import hadamard as hadamard_op
from mmqc.ops import hadamard_quantize as hadamard_quantize_op
from mmqc.ops import norm_quantize as norm_op
from mmqc.ops import norm_quantize_per_token as norm_per_token_op
from mmqc.ops import quantize_per_token as per_token_op
from mmqc.ops.hadamard_matrix import hadamard_factors

on_cuda = pytest.importorskip("mmqc.kernels.rows_on_cuda")
kernel = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize")
from mmqc.kernels.hadamard.hadamard_plan import matrices_of  # noqa: E402
from mmqc.kernels.shared.plan import Plan  # noqa: E402


@pytest.mark.parametrize("width", [64, 24, 148 * 4])
@pytest.mark.parametrize("gated", [False, True])
def test_hadamard_quantize__codes_of_the_reference(gated, width, device):
    x, up = (torch.randn(2, 5, width, device=device, dtype=torch.float16) for _ in range(2))
    factors = [f.float().to(device) for f in hadamard_factors(width)]
    scale = torch.tensor([0.02, 0.03], device=device)
    visual = torch.rand(2, 5, device=device) < 0.5
    args = (x, up if gated else None, factors, scale, visual, 8)
    assert isinstance(kernel.plan(x.view(-1, width), None, matrices_of(factors)), Plan)
    difference = on_cuda.hadamard_quantize(*args).int() - hadamard_quantize_op.reference(*args).int()
    assert difference.abs().max() <= 1  # the kernel rounds once more, between its two products
    assert (difference != 0).float().mean() < 0.05
    assert_close(on_cuda.hadamard(x, factors), hadamard_op.reference(x, factors), torch.bfloat16)


def test_hadamard__other_factors_go_to_the_reference(device):
    x = torch.randn(3, 64, device=device, dtype=torch.float16)
    flipped = [-f.float().to(device) for f in hadamard_factors(64)]
    assert "not those of" in kernel.plan(x, None, matrices_of(flipped)).reason
    assert torch.equal(on_cuda.hadamard(x, flipped), hadamard_op.reference(x, flipped))


def test_hadamard__other_factors_where_the_known_ones_were(device):
    """Memory is used again: what was known of a tensor is not known of the next one at its address."""
    x = torch.randn(3, 64, device=device, dtype=torch.float16)
    for sign in (1, -1) * 20:
        factors = [sign * f.float().to(device) for f in hadamard_factors(64)]
        assert isinstance(kernel.plan(x, None, matrices_of(factors)), Plan) == (sign == 1)
        del factors


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7,), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_norm_quantize__any_leading_axes(dtype, shape, device):
    """In float64, which no kernel takes, it is the reference."""
    x, r = (torch.randn(*shape, 96, device=device).to(dtype) for _ in "xr")
    gain, visual = torch.rand(96, device=device).to(dtype), torch.rand(shape[-1], device=device) < 0.5  # broadcast over the batch
    args = (x, r, gain, None, 1e-6, False, False, torch.tensor([0.02, 0.03], device=device), visual, 8)
    (q, total), want = on_cuda.norm_quantize(*args), norm_op.reference(*args)
    assert (q.int() - want[0].int()).abs().max() <= (dtype != torch.float64)
    assert torch.equal(total, want[1])


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7,)])
@pytest.mark.parametrize("parts", [([84, 12], [4, 8]), ([32] * 3, [2, 4, 8])])
def test_quantize_per_token__any_leading_axes(parts, shape, device):
    """Three parts, which no kernel takes without a norm, are the reference's."""
    x, order = torch.randn(*shape, 96, device=device).half(), torch.randperm(96, device=device)
    got, want = on_cuda.quantize_per_token(x, order, *parts), per_token_op.reference(x, order, *parts)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert_close(got[2], want[2])
    args = (x, None, None, None, 1e-6, True, order, *parts)
    got, want = on_cuda.norm_quantize_per_token(*args), norm_per_token_op.reference(*args)
    assert (got[0].int() - want[0].int()).abs().max() <= 1
    assert got[1].shape == want[1].shape
    assert not got[3].numel()
