import pytest
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401

quantize = torch.ops.mmqc.quantize_per_token


def by_loops(x: torch.Tensor, order: list[int], widths: list[int], bits: list[int]) -> tuple[torch.Tensor, ...]:
    """Codes, scales and offsets of a matrix, number by number."""
    q, s, o = torch.zeros_like(x), torch.zeros(len(x), len(bits)), torch.zeros(len(x), len(bits))
    for m, row in enumerate(x.tolist()):
        start = 0
        for p, (width, b) in enumerate(zip(widths, bits, strict=True)):
            part = [row[k] for k in order[start : start + width]]
            step = (torch.tensor(max(part)) - torch.tensor(min(part))) / (2**b - 1)
            if p:
                step = max(step, s[m, p - 1] * 2.0 ** (bits[p - 1] - b - 1))
            for i, value in enumerate(part):
                code = torch.round((torch.tensor(value) - torch.tensor(min(part))) / (step or 1.0))
                q[m, start + i] = code - 2 ** (b - 1)
            s[m, p], o[m, p] = step, torch.tensor(min(part)) + 2 ** (b - 1) * step
            start += width
    return q.to(torch.int8), s, o


@pytest.mark.parametrize(("widths", "bits"), [([17], [4]), ([13, 4], [4, 8]), ([1, 16], [3, 8]), ([9, 5, 3], [2, 4, 8])])
@pytest.mark.parametrize("ordered", [False, True])
def test_quantize_per_token__codes_are_the_references(widths: list[int], bits: list[int], ordered: bool) -> None:
    g = torch.Generator().manual_seed(len(bits))
    x = torch.randn(5, 17, generator=g) * torch.tensor([1.0, 1e-6, 1e4, 0.0, 1.0])[:, None] + 0.3
    order = torch.randperm(17, generator=g) if ordered else None
    got = quantize(x, order, widths, bits)
    expected = by_loops(x, list(range(17)) if order is None else order.tolist(), widths, bits)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[2])
    assert {int(q) for q in got[0][0, : widths[0]]} <= set(range(-(2 ** (bits[0] - 1)), 2 ** (bits[0] - 1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_quantize_per_token__error_is_half_a_step(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 40) * 5 + 2).to(dtype)
    widths, bits = [30, 10], [4, 8]
    q, s, o = quantize(x, None, widths, bits)
    step, shift = (t.repeat_interleave(torch.tensor(widths), -1).double() for t in (s, o))
    error = (step * q + shift - x.double()).abs()
    assert q.shape == x.shape
    assert s.shape == o.shape == (2, 3, 2)
    assert bool((error <= step * 0.500001 + 1e-12).all())
    assert bool((error > step * 0.3).any())


def test_quantize_per_token__a_constant_token_has_no_error() -> None:
    q, s, o = quantize(torch.full((2, 8), 0.5), None, [6, 2], [4, 8])
    assert_close(s[:, :1] * q[:, :6] + o[:, :1], torch.full((2, 6), 0.5))
    assert torch.equal(s, torch.zeros(2, 2))


def test_quantize_per_token__a_high_step_is_not_too_fine() -> None:
    """Where the high part hardly varies, or not at all, its step follows the low part's."""
    x = torch.cat((torch.randn(3, 6), torch.tensor([1e-6, 0.0, 1e6])[:, None] * torch.randn(3, 4)), 1)
    q, s, o = quantize(x, None, [6, 4], [4, 8])
    assert torch.equal(s[:2, 1], s[:2, 0] / 32)
    assert float(s[2, 1]) > float(s[2, 0])
    assert bool(((s[:, 1:] * q[:, 6:] + o[:, 1:] - x[:, 6:]).abs() <= s[:, 1:] * 0.50001).all())


def test_quantize_per_token__refuses() -> None:
    with pytest.raises(ValueError, match="no parts of 8 channels"):
        quantize(torch.randn(2, 8), None, [6, 1], [4, 8])
    with pytest.raises(ValueError, match="2 to 8 bits"):
        quantize(torch.randn(2, 8), None, [8], [9])


@pytest.mark.parametrize("order", [None, torch.tensor([4, 0, 1, 5, 2, 3])])
def test_quantize_per_token__opcheck(order: torch.Tensor | None) -> None:
    args = (torch.randn(2, 3, 6), order, [4, 2], [4, 8])
    torch.library.opcheck(torch.ops.mmqc.quantize_per_token.default, args)
    assert len(quantize(*args)) == 3
