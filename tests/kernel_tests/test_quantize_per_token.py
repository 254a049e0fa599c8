"""The kernel against the plain-torch op; codes are equal, whatever they are stored as."""

import pytest
import torch

from mmqc.norm import RMSNorm
from mmqc.ops.quantize_per_token import reference

kernel = pytest.importorskip("mmqc.kernels.quantize_per_token")
PARTS = [([64], [4]), ([100], [8]), ([63, 9], [4, 8]), ([56, 8], [3, 8]), ([1, 16], [2, 4])]


def poisoned(m, widths, low, high, device):
    """Memory full of what no kernel writes."""

    def made(width, dtype):
        return torch.full((m, width), 77.0, device=device).to(dtype)

    more = made(widths[1], high) if len(widths) == 2 else None
    scale, offset = (torch.full((m, len(widths)), float("nan"), device=device) for _ in "so")
    return kernel.Parts(made(widths[0], low), more, scale, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("widths", "bits"), PARTS)
def test_quantize_per_token_kernel__codes_are_the_ops(widths, bits, dtype, device):
    x = (
        torch.randn(5, sum(widths), device=device) * torch.tensor([1.0, 0.01, 30.0, 0.0, 1.0], device=device)[:, None]
        + 0.2
    ).to(dtype)
    out = poisoned(5, widths, torch.int8, torch.float16, device)
    got = kernel.quantize_per_token(x, widths, bits, out=out)
    q, s, o = reference(x, None, widths, bits)
    assert torch.equal(got.low, q[:, : widths[0]])
    assert got.high is None or torch.equal(got.high.to(torch.int8), q[:, widths[0] :])
    assert torch.equal(got.scale, s)
    torch.testing.assert_close(got.offset, o)


def test_quantize_per_token_kernel__fp8_codes_and_longer_rows(device):
    x = torch.randn(3, 200, device=device)[:, :72]
    if kernel.supports(x, [64, 8], [4, 8], kernel.FP8):
        pytest.skip("no fp8 here")
    got = kernel.quantize_per_token(x, [64, 8], [4, 8], low_code=kernel.FP8)
    q, _, _ = reference(x, None, [64, 8], [4, 8])
    assert torch.equal(got.low.float(), q[:, :64].float())
    assert torch.equal(got.high, q[:, 64:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantize_per_token_kernel__behind_a_norm(dtype, device):
    x = (torch.randn(7, 96, device=device) * 3).to(dtype)
    got = kernel.quantize_per_token(x, [84, 12], [4, 8], eps=1e-5)
    q, s, _ = reference(RMSNorm(96, 1e-5)(x), None, [84, 12], [4, 8])
    off = (torch.cat((got.low, got.high), 1).int() - q.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 0.02
    torch.testing.assert_close(got.scale, s, check_dtype=False)


def test_quantize_per_token_kernel__refuses(device):
    x = torch.randn(2, 64, device=device)
    with pytest.raises(ValueError, match="one or two parts"):
        kernel.quantize_per_token(x, [32, 16, 16], [2, 4, 8])
    with pytest.raises(ValueError, match="not exact"):
        kernel.quantize_per_token(x, [64], [8], low_code=kernel.FP8)
    assert kernel.quantize_per_token(x[:0], [64], [4]).low.shape == (0, 64)
