from collections import Counter

import pytest
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401
from mmqc.backend import backend, collect_records
from mmqc.ops.pack import pack_int4

pytestmark = pytest.mark.usefixtures("integer_products")

ops = torch.ops.mmqc
PARTS = [([17], [4]), ([40, 8], [4, 8]), ([33, 1], [4, 8]), ([9, 5, 3], [4, 4, 8]), ([16, 16], [8, 8])]


def operands(
    widths: list[int], bits: list[int], n: int = 11, seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Codes, the same as they are stored, scales, sums of codes."""
    g = torch.Generator().manual_seed(seed)
    tops = [2 ** (b - 1) for b in bits]
    codes = [torch.randint(-t, t, (n, w), dtype=torch.int8, generator=g) for w, t in zip(widths, tops, strict=True)]
    stored = [pack_int4(c) if b == 4 else c for c, b in zip(codes, bits, strict=True)]
    return codes, stored, torch.rand(n, len(widths), generator=g) + 0.1, torch.stack([c.sum(1).int() for c in codes], 1)


@pytest.mark.parametrize(("widths", "bits"), PARTS)
def test_mixed_matmul__is_the_dequantized_product(widths: list[int], bits: list[int]) -> None:
    codes, stored, s_w, sums = operands(widths, bits)
    x, bias, repeats = torch.randn(2, 3, sum(widths)) + 1, torch.randn(11), torch.tensor(widths)
    q, s, o = ops.quantize_per_token(x, None, widths, bits)
    real_x = q.double() * s.double().repeat_interleave(repeats, -1) + o.double().repeat_interleave(repeats, -1)
    real_w = torch.cat(codes, 1).double() * s_w.double().repeat_interleave(repeats, 1)
    expected = real_x @ real_w.T + bias.double()
    assert_close(ops.mixed_matmul(q, s, o, stored, s_w, sums, bias, widths, bits, torch.float64), expected)
    y = ops.mixed_matmul(q, s, o, stored, s_w, sums, None, widths, bits, torch.float32)
    assert_close(y + bias, expected)
    half = ops.mixed_matmul(q, s, o, stored, s_w, sums, None, widths, bits, torch.bfloat16)
    assert torch.equal(half, y.bfloat16())


def test_mixed_matmul__low_and_high_do_not_meet() -> None:
    """Equation 4: a change of the high part changes nothing that the low part adds."""
    widths, bits = [24, 8], [4, 8]
    _, stored, s_w, sums = operands(widths, bits)
    x = torch.randn(5, 32, dtype=torch.float64)
    y = {}
    for which in ("both", "low", "high"):
        q, s, o = ops.quantize_per_token(x, None, widths, bits)
        if which != "both":
            gone = 1 if which == "low" else 0
            s[:, gone], o[:, gone] = 0, 0
        y[which] = ops.mixed_matmul(q, s, o, stored, s_w, sums, None, widths, bits, torch.float64)
    assert_close(y["low"] + y["high"], y["both"])


def test_mixed_matmul__refuses() -> None:
    widths, bits = [24, 8], [4, 8]
    _, stored, s_w, sums = operands(widths, bits)
    q, s, o = ops.quantize_per_token(torch.randn(5, 32), None, widths, bits)
    with pytest.raises(ValueError, match="2 parts, but 1 weights"):
        ops.mixed_matmul(q, s, o, stored[:1], s_w, sums, None, widths, bits, torch.float32)
    with pytest.raises(ValueError, match="4-bit weight"):
        ops.mixed_matmul(q, s, o, stored[::-1], s_w, sums, None, widths, bits, torch.float32)
    with pytest.raises(ValueError, match="x_offset has shape"):
        ops.mixed_matmul(q, s, o[:, :1], stored, s_w, sums, None, widths, bits, torch.float32)
    with pytest.raises(ValueError, match="x_q is int8"):
        ops.mixed_matmul(q.int(), s, o, stored, s_w, sums, None, widths, bits, torch.float32)


@pytest.mark.parametrize(("widths", "bits"), PARTS[:2])
def test_mixed_matmul__opcheck(widths: list[int], bits: list[int]) -> None:
    _, stored, s_w, sums = operands(widths, bits)
    q, s, o = ops.quantize_per_token(torch.randn(3, sum(widths)), None, widths, bits)
    args = (q, s, o, stored, s_w, sums, torch.randn(11), widths, bits, torch.float32)
    torch.library.opcheck(ops.mixed_matmul.default, args)
    assert ops.mixed_matmul(*args).shape == (3, 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_mixed_matmul__compiled_equals_eager(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    widths, bits = [40, 8], [4, 8]
    _, stored, s_w, sums = operands(widths, bits, n=24)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, s, o = ops.quantize_per_token(x, order, widths, bits)
        return q, ops.mixed_matmul(q, s, o, stored, s_w, sums, torch.ones(24), widths, bits, dtype)

    x = torch.randn(2, 9, 48).to(dtype)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        codes, y = compiled(x)
    expected_codes, expected = function(x)
    assert torch.equal(codes, expected_codes)
    assert_close(y, expected)
    (record,) = records
    assert record.ops == Counter(quantize_per_token=1, mixed_matmul=1)
    assert record.kernels.count("extern _int_mm") == 2
    assert record.fallbacks == []
