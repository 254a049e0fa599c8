"""The fused kernel: codes, scales and offsets are those of the two kernels one after the other."""

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional as F

from mmqc.kernels.shared.row_scale import Rows
from mmqc.ops import hadamard, quantize_per_token

kernel = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize_per_token")
apart = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize")
SHAPES = [(5, 64, 8), (3, 1280, 4), (70, 27, 3), (2, 5120, 4), (3, 12 * 16, 8), (4, 1, 4), (2, 4304, 4)]


def poisoned(m, n, device):
    """Memory full of what no kernel writes."""
    scale, offset = (torch.full((m, 1), float("nan"), device=device) for _ in "so")
    return Rows(torch.full((m, n), 77, dtype=torch.int8, device=device), scale, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width", "bits"), SHAPES)
def test_hadamard_quantize_per_token__codes_of_the_unfused_path(rows, width, bits, dtype, device):
    shape = (rows, width)
    x = (torch.randn(shape, device=device) + 0.3).to(dtype)
    if (reason := kernel.supports(x, None, bits)) and "shared memory" in reason:
        pytest.skip(reason)
    x[-1] = 0
    out = poisoned(*shape, device)
    assert kernel.hadamard_quantize_per_token(x, bits, out=out, programs=2) is out
    y = apart.hadamard_quantize(x, code=None, programs=2).y
    q, s, o = quantize_per_token.reference(y, None, [shape[1]], [bits])
    assert torch.equal(out.q, q)
    assert torch.equal(out.scale, s)
    assert_close(out.offset, o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 192), (2, 3584), (2, 5120)])
def test_hadamard_quantize_per_token__behind_a_gated_mlp(shape, dtype, device):
    gate, up = torch.randn(shape[0], 2 * shape[1], device=device).to(dtype).chunk(2, 1)
    out = kernel.hadamard_quantize_per_token(gate, 4, up=up, out=poisoned(*shape, device), programs=2)
    y = apart.hadamard_quantize(gate, up=up, code=None, programs=2).y
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
    monkeypatch.setattr(kernel, "few", lambda x, t: True)
    x = torch.randn(2, 3584, device=device)
    out = kernel.hadamard_quantize_per_token(x, 4, out=poisoned(2, 3584, device))
    y = apart.hadamard_quantize(x, code=None).y
    assert torch.equal(out.q, quantize_per_token.reference(y, None, [3584], [4])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(330, 3584), (200, 18944), (300, 5120), (257, 4304), (400, 14336)])
def test_hadamard_quantize_per_token__bfloat16(shape, gated, device):
    x, up = (torch.randn(shape, device=device).bfloat16() for _ in "xu")
    up = up if gated else None
    out = kernel.hadamard_quantize_per_token(x, 4, up=up, out=poisoned(*shape, device), programs=64)
    y = apart.hadamard_quantize(x, up=up, code=None, programs=64).y
    q, s, _ = quantize_per_token.reference(y, None, [shape[1]], [4])
    assert torch.equal(out.q, q)
    assert torch.equal(out.scale, s)


def test_hadamard_quantize_per_token__refuses(device):
    x = torch.randn(2, 64, device=device)
    with pytest.raises(ValueError, match="up is like x"):
        kernel.hadamard_quantize_per_token(x, 4, up=x[:1])
    with pytest.raises(ValueError, match="bits = 9"):
        kernel.hadamard_quantize_per_token(x, 9)
    assert kernel.hadamard_quantize_per_token(x[:0], 4).q.shape == (0, 64)
