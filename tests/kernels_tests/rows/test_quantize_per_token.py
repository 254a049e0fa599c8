"""The kernel against the plain-torch op; codes are equal."""

import pytest
import torch
from tolerance import assert_close

from mmqc.nn.norm import RMSNorm
from mmqc.ops.quantize_per_token import reference

kernel = pytest.importorskip("mmqc.kernels.rows.quantize_per_token")
PARTS = [([64], [4]), ([100], [8]), ([63, 9], [4, 8]), ([56, 8], [3, 8]), ([1, 16], [2, 4]), ([3], [4])]


def poisoned(m, widths, device):
    """Memory full of what no kernel writes."""
    scale, offset = (torch.full((m, len(widths)), float("nan"), device=device) for _ in "so")
    return kernel.Rows(torch.full((m, sum(widths)), 77, dtype=torch.int8, device=device), scale, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("widths", "bits"), PARTS)
def test_quantize_per_token_kernel__codes_are_the_ops(widths, bits, dtype, device):
    rows = torch.tensor([1.0, 0.01, 30.0, 0.0, 1.0], device=device)[:, None]
    x = (torch.randn(5, sum(widths), device=device) * rows + 0.2).to(dtype)
    x[4, widths[0] :] = 0.5
    out = poisoned(5, widths, device)
    assert kernel.quantize_per_token(x, widths, bits, out=out) is out
    q, s, o = reference(x, None, widths, bits)
    assert torch.equal(out.q, q)
    assert torch.equal(out.scale, s)
    assert_close(out.offset, o)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("widths", "bits"), [([3584, 512], [4, 8]), ([3136, 448], [4, 8]), ([18944], [4]), ([1121, 159], [3, 8])])
@pytest.mark.parametrize("warps", [None, 1, 4])
def test_quantize_per_token_kernel__sizes_of_models(widths, bits, dtype, warps):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = (torch.randn(70, sum(widths), device="cuda") + 0.1).to(dtype)
    got = kernel.quantize_per_token(x, widths, bits, out=poisoned(70, widths, "cuda"), num_warps=warps)
    q, s, o = reference(x, None, widths, bits)
    assert torch.equal(got.q, q)
    assert torch.equal(got.scale, s)
    assert_close(got.offset, o)


def test_quantize_per_token_kernel__longer_rows(device):
    x = torch.randn(3, 200, device=device)[:, :72]
    got = kernel.quantize_per_token(x, [64, 8], [4, 8])
    q, s, _ = reference(x, None, [64, 8], [4, 8])
    assert torch.equal(got.q, q)
    assert torch.equal(got.scale, s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantize_per_token_kernel__behind_a_norm(dtype, device):
    x = (torch.randn(7, 96, device=device) * 3).to(dtype)
    got = kernel.quantize_per_token(x, [84, 12], [4, 8], eps=1e-5)
    q, s, _ = reference(RMSNorm(96, 1e-5).to(device)(x), None, [84, 12], [4, 8])
    off = (got.q.int() - q.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 0.02
    assert_close(got.scale, s, dtype)


def test_quantize_per_token_kernel__refuses(device):
    x = torch.randn(2, 64, device=device)
    with pytest.raises(ValueError, match="one or two parts"):
        kernel.quantize_per_token(x, [32, 16, 16], [2, 4, 8])
    with pytest.raises(ValueError, match="2 to 8"):
        kernel.quantize_per_token(x, [64], [9])
    assert kernel.quantize_per_token(x[:0], [64], [4]).q.shape == (0, 64)
