"""The fused kernel: codes, scales and offsets are those of the two kernels one after the other."""

import pytest
import torch
from poison import poisoned
from tolerance import assert_close
from torch.nn import functional as F

from mmqc.ops import hadamard, quantize_per_token

kernel = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize_per_token")
apart = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize")
from mmqc.kernels.hadamard.hadamard_plan import hadamard_plan  # noqa: E402
from mmqc.kernels.hadamard.hadamard_tiles import Written  # noqa: E402
from mmqc.kernels.shared.row_scale import Rows  # noqa: E402

SHAPES = [(5, 64, 8), (3, 1280, 4), (70, 27, 3), (2, 5120, 4), (3, 12 * 16, 8), (4, 1, 4), (2, 4304, 4)]


def by_rows(x, up=None, programs=2):
    """Y, by the kernel that takes whole rows."""
    written = Written(torch.full_like(x, float("nan")))
    apart.rows_launch(x, up, written, hadamard_plan(x.shape[1], x.device, x.dtype), programs).run()
    return written.y


def quantized_by_rows(x, bits, up=None, programs=2):
    """Codes, scales and offsets by the same kernel."""
    out = Rows.new(poisoned(x), x.shape[1], 1)
    written = Written(out.q, None, out.scale, out.offset, bits)
    apart.rows_launch(x, up, written, hadamard_plan(x.shape[1], x.device, x.dtype), programs).run()
    return out


def hadamard_quantize_per_token(x, bits, up=None):
    return kernel.plan(x, up, hadamard_plan, bits, poisoned(x)).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width", "bits"), SHAPES)
def test_hadamard_quantize_per_token__codes_of_the_unfused_path(rows, width, bits, dtype, device):
    shape = (rows, width)
    x = (torch.randn(shape, device=device) + 0.3).to(dtype)
    if x.is_cuda and dtype == torch.float32 and width == 4304:
        pytest.skip("its tiles in float32 are larger than a multiprocessor's memory")
    x[-1] = 0
    out, y = quantized_by_rows(x, bits), by_rows(x)
    q, s, o = quantize_per_token.reference(y, None, [shape[1]], [bits])
    assert torch.equal(out.q, q)
    assert torch.equal(out.scale, s)
    assert_close(out.offset, o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 192), (2, 3584), (2, 5120)])
def test_hadamard_quantize_per_token__behind_a_gated_mlp(shape, dtype, device):
    gate, up = torch.randn(shape[0], 2 * shape[1], device=device).to(dtype).chunk(2, 1)
    out, y = quantized_by_rows(gate, 4, up), by_rows(gate, up)
    q, s, _ = quantize_per_token.reference(y, None, [shape[1]], [4])
    assert torch.equal(out.q, q)
    assert torch.equal(out.scale, s)
    factors = [f.to(device) for f in hadamard.hadamard_factors(shape[1])]
    exact = hadamard.reference((F.silu(gate) * up).double(), factors)
    want = quantize_per_token.reference(exact, None, [shape[1]], [4])
    off = (out.q.int() - want[0].int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 0.03, "h and A h are rounded to x's dtype"


def test_hadamard_quantize_per_token__few_rows_are_two_kernels(device, monkeypatch):
    """Slices of rows, and then the quantization: the same result but for the order of sums."""
    for module in (kernel, apart):
        monkeypatch.setattr(module, "few", lambda x, t: True)
    x = torch.randn(2, 3584, device=device).half()
    out = hadamard_quantize_per_token(x, 4)
    y = apart.plan(x, None, hadamard_plan, new=poisoned(x)).run()
    assert torch.equal(out.q, quantize_per_token.reference(y, None, [3584], [4])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(330, 3584), (200, 18944), (300, 5120), (257, 4304), (400, 14336)])
def test_hadamard_quantize_per_token__bfloat16(shape, gated, device):
    x, up = (torch.randn(shape, device=device).bfloat16() for _ in "xu")
    up = up if gated else None
    out, y = quantized_by_rows(x, 4, up, 64), by_rows(x, up, 64)
    q, s, _ = quantize_per_token.reference(y, None, [shape[1]], [4])
    assert torch.equal(out.q, q)
    assert torch.equal(out.scale, s)


def test_hadamard_quantize_per_token__refuses(device):
    x = torch.randn(2, 64, device=device).half()
    with pytest.raises(ValueError, match="up is like x"):
        hadamard_quantize_per_token(x, 4, up=x[:1])
    with pytest.raises(ValueError, match="bits = 9"):
        hadamard_quantize_per_token(x, 9)
    assert hadamard_quantize_per_token(x[:0], 4).q.shape == (0, 64)
