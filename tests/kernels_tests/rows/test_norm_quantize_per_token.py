"""The kernel against the plain-torch op: the sums equal, codes but for those that a last bit of rsqrt moves."""

import offline
import pytest
import torch
from poison import poisoned
from tolerance import assert_close, few_differ

from mmqc.ops.norm_quantize_per_token import reference

kernel = pytest.importorskip("mmqc.kernels.rows.norm_quantize_per_token")
PARTS = [
    ([64], [4]),
    ([100], [8]),
    ([63, 9], [4, 8]),
    ([56, 8], [3, 8]),
    ([1, 16], [2, 4]),
    ([3], [4]),
    ([1], [4]),
    ([17, 31, 9], [2, 4, 8]),
    ([24, 60, 12], [2, 4, 8]),
]


def made(residual: str, *widths: str):
    """A launch in bfloat16, for offline.py, whose process has no device."""
    kernel.why_not_here = lambda *tensors: None
    sizes = [int(width) for width in widths]
    x, norm = operands(5, sum(sizes), torch.bfloat16, "cpu", residual=residual == "True")
    return kernel.plan(x, norm, None, sizes, [4, 8, 8][: len(sizes)], poisoned(x)).launches[0]


def norm_quantize_per_token(x, norm, widths, bits, order=None):
    return kernel.plan(x, norm, order, widths, bits, poisoned(x)).run()


def operands(m, width, dtype, device, gain=True, bias=False, residual=False, round_first=False):
    x, r = ((torch.randn(m, width, device=device) * 3).to(dtype) for _ in "xr")
    g, b = ((1 + 0.2 * torch.randn(width, device=device)).to(dtype) for _ in "gb")
    return x, kernel.Norm(1e-5, g if gain else None, b if bias else None, r if residual else None, round_first)


def ends(scale, offset, bits):
    """The least and the largest value of every part; offsets lie between them, and may be next to nothing."""
    steps = torch.tensor([2.0**b for b in bits], device=scale.device)
    return offset - scale * steps / 2, offset + scale * (steps / 2 - 1)


def assert_like_op(x, norm, order, widths, bits, num_warps=None):
    """The kernel's result, which may differ from the op's in three codes of a hundred, by one."""
    plan = kernel.plan(x, norm, order, widths, bits, poisoned(x))
    if num_warps is not None:
        plan = plan._replace(launches=tuple(launch._replace(num_warps=num_warps) for launch in plan.launches))
    got, h = plan.run()
    q, s, o, want_h = reference(x, norm.residual, norm.gain, norm.bias, norm.eps, norm.round_first, order, widths, bits)
    few_differ(got.q, q, 0.03)
    for actual, expected in zip(ends(got.scale, got.offset, bits), ends(s, o, bits), strict=True):
        assert_close(actual, expected, x.dtype)
    if norm.residual is not None:
        assert torch.equal(h, want_h)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("widths", "bits"), PARTS)
def test_norm_quantize_per_token_kernel__parts(widths, bits, dtype, device):
    x, norm = operands(5, sum(widths), dtype, device, gain=sum(widths) > 1)
    x[3] = 0
    assert_like_op(x, norm, None, widths, bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize(("gain", "bias", "residual"), [(0, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_norm_quantize_per_token_kernel__what_the_norm_has(gain, bias, residual, round_first, dtype, device):
    x, norm = operands(7, 96, dtype, device, gain, bias, residual, round_first)
    assert_like_op(x, norm, None, [84, 12], [4, 8])
    assert_like_op(x, norm, torch.randperm(96, device=device), [84, 12], [4, 8], num_warps=2)


def test_norm_quantize_per_token_kernel__codes_are_those_of_the_unfused_path(device):
    """Where rsqrt is exact, so is everything behind it: rows of plus and minus 2^k have mean square 4^k."""
    signs = torch.randint(0, 2, (9, 96), device=device) * 2.0 - 1
    x = signs * torch.tensor([2.0**k for k in range(-4, 5)], device=device)[:, None]
    gain = 1 + 0.2 * torch.randn(96, device=device)
    norm = kernel.Norm(0.0, gain)
    got, _ = norm_quantize_per_token(x, norm, [24, 60, 12], [2, 4, 8])
    q, s, _, _ = reference(x, None, gain, None, 0.0, False, None, [24, 60, 12], [2, 4, 8])
    assert torch.equal(got.q, q)
    assert torch.equal(got.scale, s)


def test_norm_quantize_per_token_kernel__gain_of_another_type_and_longer_rows(device):
    x, norm = operands(4, 96, torch.float16, device)
    assert_like_op(x, norm._replace(gain=norm.gain.float()), None, [84, 12], [4, 8])
    wide = torch.randn(4, 200, device=device)
    x, norm = wide[:, :72], kernel.Norm(1e-5, residual=wide[:, 100:172])
    assert_like_op(x, norm, None, [64, 8], [4, 8])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize(
    ("widths", "bits"), [([3584, 512], [4, 8]), ([3136, 448], [4, 8]), ([1121, 159], [3, 8]), ([1024, 2560, 512], [2, 4, 8])]
)
@pytest.mark.parametrize("warps", [None, 1, 4])
def test_norm_quantize_per_token_kernel__sizes_of_models(widths, bits, dtype, round_first, warps):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x, norm = operands(70, sum(widths), dtype, "cuda", residual=True, round_first=round_first)
    assert_like_op(x, norm, None, widths, bits, num_warps=warps)


def test_norm_quantize_per_token_kernel__refuses(device):
    x, norm = operands(2, 64, torch.float32, device)
    with pytest.raises(ValueError, match="one to three parts"):
        norm_quantize_per_token(x, norm, [16] * 4, [2, 4, 6, 8])
    with pytest.raises(ValueError, match="2 to 8"):
        norm_quantize_per_token(x, norm, [64], [9])
    with pytest.raises(ValueError, match="residual is like x"):
        norm_quantize_per_token(x, norm._replace(residual=x[:1]), [64], [4])
    with pytest.raises(ValueError, match=r"order is int64 \[64\]"):
        norm_quantize_per_token(x, norm, [64], [4], order=torch.arange(63, device=device))
    assert norm_quantize_per_token(x[:0], norm, [64], [4])[0].q.shape == (0, 64)


@pytest.mark.parametrize("widths", [(33, 7), (1,), (448, 64)])
def test_norm_quantize_per_token_kernel__compiles_for_a_device(widths):
    """Tiles of one channel too, which have no pair to round."""
    told, _ = offline.compiled("test_norm_quantize_per_token", True, *widths)
    assert offline.spilled(told) == 0


@pytest.mark.parametrize("widths", [(255,), (128, 566)])
def test_norm_quantize_per_token_kernel__cuts_codes_off_where_they_are_stored_one_by_one(widths):
    """No conversion of the float that has one in its low byte: it saturates, and all codes of a tile were -1."""
    code = offline.instructions("test_norm_quantize_per_token", False, *widths)
    assert "STG" in code
    assert "F2IP" not in code
