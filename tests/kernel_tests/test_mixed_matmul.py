"""The kernel against the plain-torch op, with NaN-filled results and sizes that fill no tile."""

import pytest
import torch

from mmqc.ops.mixed_matmul import reference
from mmqc.ops.pack import pack_int4
from mmqc.ops.quantize_per_token import reference as quantize

kernel = pytest.importorskip("mmqc.kernels.mixed_matmul")
SIZES = [(1, 17, 48, 16), (63, 100, 96, 16), (37, 33, 160, 32), (65, 64, 112, 0)]


def problem(m, n, low, high, device, seed=0):
    """(x codes, scales, offsets), (w codes, scales, sums), widths, bits."""
    g = torch.Generator().manual_seed(seed)
    widths, bits = ([low, high], [4, 8]) if high else ([low], [4])
    x = quantize(torch.randn(m, low + high, generator=g) + 0.5, None, widths, bits)
    codes = [
        torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, k), dtype=torch.int8, generator=g)
        for k, b in zip(widths, bits, strict=True)
    ]
    scale = torch.rand(n, len(widths), generator=g) + 0.1
    sums = torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
    return (
        tuple(t.to(device) for t in x),
        ([c.to(device) for c in codes], scale.to(device), sums.to(device)),
        widths,
        bits,
    )


def operands(x, w, widths, high_code=torch.int8):
    (q, s, o), (codes, scale, sums) = x, w
    low, *more = q.split(widths, 1)
    parts = kernel.Parts(low.contiguous(), more[0].to(high_code).contiguous() if more else None, s, o)
    return parts, kernel.Weight(codes[0], codes[1].to(high_code) if more else None, scale, sums)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("high_code", [torch.int8, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_matmul_kernel__equals_the_op(size, high_code, dtype, device):
    m, n, low, high = size
    x, w, widths, bits = problem(m, n, low, high, device)
    bias = torch.randn(n, device=device) if m % 2 else None
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    parts, weight = operands(x, w, widths, high_code)
    assert kernel.mixed_matmul(parts, weight, bias, out=out, out_dtype=dtype) is out
    stored = [pack_int4(w[0][0]), *w[0][1:]]
    expected = reference(*x, stored, w[1], w[2], bias, widths, bits, torch.float64)
    error = (out.double() - expected).norm() / expected.norm()
    assert float(error) < (1e-6 if dtype == torch.float32 else 1e-3)


def test_mixed_matmul_kernel__packed_weights_and_views(device):
    """As the op has them: codes of both parts in one matrix, the low weights packed."""
    x, (codes, scale, sums), widths, bits = problem(40, 48, 64, 16, device)
    q, s, o = x
    parts = kernel.Parts(q[:, :64], q[:, 64:], s, o)
    weight = kernel.Weight(pack_int4(codes[0]), codes[1], scale, sums)
    y = kernel.mixed_matmul(parts, weight, out_dtype=torch.float32)
    expected = reference(*x, [pack_int4(codes[0]), codes[1]], scale, sums, None, widths, bits, torch.float64)
    assert float((y.double() - expected).norm() / expected.norm()) < 1e-6


def test_mixed_matmul_kernel__fp8_low_part(device):
    x, w, widths, bits = problem(33, 40, 96, 16, device)
    parts, weight = operands(x, w, widths, torch.float16)
    parts, weight = parts._replace(low=parts.low.to(kernel.FP8)), weight._replace(low=weight.low.to(kernel.FP8))
    if reason := kernel.supports(parts, weight, None, torch.float32):
        pytest.skip(reason)
    y = kernel.mixed_matmul(parts, weight, out_dtype=torch.float32)
    expected = reference(*x, [pack_int4(w[0][0]), w[0][1]], w[1], w[2], None, widths, bits, torch.float64)
    assert float((y.double() - expected).norm() / expected.norm()) < 2e-3


def test_mixed_matmul_kernel__refuses(device):
    x, w, widths, _ = problem(5, 16, 48, 16, device)
    parts, weight = operands(x, w, widths)
    with pytest.raises(ValueError, match="different parts"):
        kernel.mixed_matmul(parts._replace(high=None), weight)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        kernel.mixed_matmul(
            parts._replace(low=parts.low[:, :40].contiguous()), weight._replace(low=weight.low[:, :40].contiguous())
        )
    with pytest.raises(ValueError, match="out is"):
        kernel.mixed_matmul(parts, weight, out=torch.empty(5, 17, device=device))
