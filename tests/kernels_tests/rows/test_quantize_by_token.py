"""The kernel against the formula of ops/token_matmul.py; codes and scales are equal."""

import pytest
import torch
from poison import poisoned

from mmqc.kernels.shared.plan import Refusal
from mmqc.ops.quantize import codes
from mmqc.ops.token_matmul import token_scales

kernel = pytest.importorskip("mmqc.kernels.rows.quantize_by_token")
CODES = [torch.int8, torch.float8_e4m3fn]


def assert_same(x, code):
    scale = token_scales(x, code)
    got = kernel.plan(x, code, poisoned(x)).run()
    assert torch.equal(got.scale, scale)
    assert torch.equal(got.q.float(), codes(x, scale, 8, code).float())  # whatever the sign of a zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 17, 64, 100, 257])
def test_quantize_by_token_kernel__codes_are_the_formulas(width, dtype, device):
    rows = torch.tensor([1.0, 0.01, 30.0, 0.0, 1.0], device=device)[:, None]
    assert_same((torch.randn(5, width, device=device) * rows).to(dtype), torch.int8)


@pytest.mark.parametrize("step", [1.0, 0.25])
def test_quantize_by_token_kernel__float8_numbers_are_their_own_codes(step, device):
    """Others are rounded on a GPU alone: Triton's interpreter loses the carry from mantissa to exponent."""
    x = torch.randn(4, 100, device=device).mul(100).to(torch.float8_e4m3fn).float()
    x[:, 7] = 448.0
    assert_same(x * step, torch.float8_e4m3fn)


def test_quantize_by_token_kernel__rows_may_be_far_apart(device):
    assert_same(torch.randn(4, 96, device=device)[:, :48], torch.int8)


def test_quantize_by_token_kernel__says_what_it_cannot_take(device):
    for x, words in (
        (torch.randn(2, 8, device=device).double(), "float64"),
        (torch.randn(8, device=device), "matrix"),
        (torch.randn(8, 2, device=device).T, "contiguous"),
        (torch.empty(1, 65_537, device=device), "65537"),
    ):
        found = kernel.plan(x, torch.int8)
        assert isinstance(found, Refusal)
        assert words in found.reason


@pytest.mark.gpu
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [3584, 4304, 18944])
def test_quantize_by_token_kernel__sizes_of_models(width, dtype, code):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert_same((torch.randn(70, width, device="cuda") + 0.1).to(dtype), code)
