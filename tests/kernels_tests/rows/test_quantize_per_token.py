"""The kernel against the plain-torch op; codes are equal."""

import pytest
import torch
from poison import poisoned
from tolerance import assert_close

from mmqc.ops.quantize_per_token import reference

kernel = pytest.importorskip("mmqc.kernels.rows.quantize_per_token")
PARTS = [([64], [4]), ([100], [8]), ([63, 9], [4, 8]), ([56, 8], [3, 8]), ([1, 16], [2, 4]), ([3], [4])]


def quantize_per_token(x, widths, bits):
    return kernel.plan(x, widths, bits, poisoned(x)).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("widths", "bits"), PARTS)
def test_quantize_per_token_kernel__codes_are_the_ops(widths, bits, dtype, device):
    rows = torch.tensor([1.0, 0.01, 30.0, 0.0, 1.0], device=device)[:, None]
    x = (torch.randn(5, sum(widths), device=device) * rows + 0.2).to(dtype)
    x[4, widths[0] :] = 0.5
    out = quantize_per_token(x, widths, bits)
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
    (launch,), got = kernel.plan(x, widths, bits, poisoned(x))
    launch._replace(num_warps=warps or launch.num_warps).run()
    q, s, o = reference(x, None, widths, bits)
    assert torch.equal(got.q, q)
    assert torch.equal(got.scale, s)
    assert_close(got.offset, o)


def test_quantize_per_token_kernel__longer_rows(device):
    x = torch.randn(3, 200, device=device)[:, :72]
    got = quantize_per_token(x, [64, 8], [4, 8])
    q, s, _ = reference(x, None, [64, 8], [4, 8])
    assert torch.equal(got.q, q)
    assert torch.equal(got.scale, s)


def test_quantize_per_token_kernel__refuses(device):
    x = torch.randn(2, 64, device=device)
    with pytest.raises(ValueError, match="one or two parts"):
        quantize_per_token(x, [32, 16, 16], [2, 4, 8])
    with pytest.raises(ValueError, match="2 to 8"):
        quantize_per_token(x, [64], [9])
    assert quantize_per_token(x[:0], [64], [4]).q.shape == (0, 64)
