"""norm_quantize against the norm module followed by the plain-torch quantize op."""

import offline
import pytest
import torch
from poison import poisoned
from row_scales import KINDS, row_scales

from mmqc.kernels.shared.row_scale import row_scale
from mmqc.nn.norm import RMSNorm
from mmqc.ops import quantize
from mmqc.ops.norm_quantize import normed

kernel = pytest.importorskip("mmqc.kernels.rows.norm_quantize")
NORM = kernel.Norm(1e-6)
SHAPES = [(5, 64), (3, 100), (1, 27), (4, 1), (2, 1280), (3, 3420)]


def made(width: str, center: str):
    """A launch in bfloat16 with everything in front, for offline.py, whose process has no device."""
    kernel.why_not_here = lambda *tensors: None
    n = int(width)
    x, residual = (torch.zeros(5, n, dtype=torch.bfloat16) for _ in "xr")
    norm = kernel.Norm(1e-6, torch.ones(n).bfloat16(), torch.ones(n).bfloat16(), residual, True, center == "True")
    return kernel.plan(x, norm, row_scale(torch.ones(1), 5), new=poisoned(x)).launches[0]


def norm_quantize(x, norm, scale, bits=8, **rows):
    return kernel.plan(x, norm, row_scale(scale, len(x), **rows), bits, new=poisoned(x)).run()


def assert_codes(actual, expected, rate=2e-3):
    """Equal, but for a few codes whose quotient lies on a rounding boundary: the sums of squares add in another order."""
    off = (actual.int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= rate + 1.5 / off.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_quantize__static_equals_norm_then_quantize(shape, kind, dtype, device):
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    norm = RMSNorm(shape[1]).to(device)
    scale, more, rows = row_scales(kind, shape[0], device)
    got = norm_quantize(x, NORM, scale, **more)
    assert got.total is None
    assert_codes(got.q, torch.round(norm(x).float() / rows[:, None]).clamp(-128, 127))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_quantize__with_gain_bias_and_residual(shape, dtype, device):
    m, width = shape
    x, residual = (torch.randn(m, width, device=device).to(dtype) for _ in range(2))
    norm = RMSNorm(width, 1e-5, torch.randn(width), torch.randn(width)).to(device)
    y = norm(x + residual).float()
    scale = y.abs().amax(1) / 127
    got = norm_quantize(x, kernel.Norm(1e-5, norm.weight.detach(), norm.bias.detach(), residual), scale)
    assert torch.equal(got.total, x + residual)
    assert_codes(got.q, torch.round(y / scale[:, None]).clamp(-128, 127))


@pytest.mark.parametrize("vectors", ["", "gain", "gain, bias"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_quantize__layer_norm(shape, vectors, device):
    m, width = shape
    x, residual = (3 + torch.randn(m, width, device=device) for _ in range(2))
    gain, bias = (torch.randn(width, device=device) if name in vectors else None for name in ("gain", "bias"))
    scale, more, rows = row_scales("visual", m, device)
    norm = kernel.Norm(1e-5, gain, bias, residual, center=True)
    got = norm_quantize(x, norm, scale, **more)
    y = torch.nn.functional.layer_norm(x + residual, (width,), gain, bias, 1e-5)
    assert torch.equal(got.total, x + residual)
    assert_codes(got.q, torch.round(y / rows[:, None]).clamp(-128, 127))


def test_norm_quantize__rounds_in_front_of_the_gain(device):
    x = torch.randn(7, 300, device=device).half()
    gain, bias = ((1 + 0.1 * torch.randn(300, device=device)).half() for _ in "gb")
    scale = torch.tensor([2.0**-9], device=device)  # a step of float16 next to 1: codes show where y was rounded
    for first in (False, True):
        got = norm_quantize(x, kernel.Norm(1e-6, gain, bias, round_first=first), scale)
        y = normed(x, gain, bias, 1e-6, first)
        # on a device product and sum round once (fma), in torch twice, and here a step is float16's own: 1 to 3 codes in 100
        assert_codes(got.q, quantize.reference(y, scale, None, 8), 6e-2 if x.is_cuda else 2e-3)
    other = quantize.reference(normed(x, gain, bias, 1e-6, False), scale, None, 8)
    assert (got.q != other).float().mean() > 5e-3, "codes of the two differ by more than is allowed on a CPU"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (1280, (1024, 256)),
        (3584, (4096, 0)),
        (5120, (4096, 1024)),
        (64, (64, 0)),
        (1100, (2048, 0)),
        (1, (1, 0)),
        (2048, (2048, 0)),
    ],
)
def test_norm_quantize__parts_of_a_row(width, expected):
    assert kernel.parts(width) == expected
    assert sum(expected) >= width


def test_norm_quantize__fewer_bits_and_rows_of_longer_rows(device):
    x = torch.randn(4, 200, device=device)[:, :100]
    scale = torch.tensor([0.3], device=device)
    got = norm_quantize(x, NORM, scale, bits=4)
    assert_codes(got.q, quantize.reference(RMSNorm(100)(x), scale, None, 4))
    assert got.q.min() >= -8
    assert got.q.max() <= 7


def test_norm_quantize__token_of_zeros_has_zero_codes(device):
    got = norm_quantize(torch.zeros(2, 64, device=device), NORM, torch.ones(1, device=device))
    assert not got.q.any()


@pytest.mark.gpu
def test_norm_quantize__bfloat16(device):
    x = torch.randn(33, 3584, device=device).bfloat16()
    scale = torch.tensor([0.02], device=device)
    assert_codes(norm_quantize(x, NORM, scale).q, quantize.reference(RMSNorm(3584).to(device)(x), scale, None, 8))


def test_norm_quantize__division_is_ieee(device):
    # A row of equal magnitudes has the norm 1 up to rounding; here only the quotient matters, on many scales.
    x = torch.randn(64, 128, device=device)
    scale = torch.rand(64, device=device) * 0.05 + 0.001
    got = norm_quantize(x, NORM, scale)
    y = RMSNorm(128)(x)
    assert_codes(got.q, torch.round(y / scale[:, None]).clamp(-128, 127))


def test_norm_quantize__names_what_is_wrong(device):
    x, scale = torch.randn(2, 64, device=device), torch.ones(1, device=device)
    with pytest.raises(ValueError, match=r"gain and bias are \[64\]"):
        norm_quantize(x, kernel.Norm(1e-6, torch.ones(32, device=device)), scale)
    with pytest.raises(ValueError, match="bits = 9"):
        norm_quantize(x, NORM, scale, bits=9)
    with pytest.raises(ValueError, match="x is one of"):
        norm_quantize(x.double(), NORM, scale)
    with pytest.raises(ValueError, match="gain and bias behind a rounding"):
        norm_quantize(x, kernel.Norm(1e-6, torch.ones(64, device=device).half(), round_first=True), scale)


@pytest.mark.slow
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("width", [1, 1280, 3584, 8192])
def test_norm_quantize__compiles_for_a_device_without_spills(width, center):
    told, _ = offline.compiled("test_norm_quantize", width, center)
    assert offline.spilled(told) == 0
