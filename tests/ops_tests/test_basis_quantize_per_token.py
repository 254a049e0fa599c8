"""The basis and the quantization in one op."""

import pytest
import torch

import mmqc.ops  # noqa: F401

ops = torch.ops.mmqc


def operands(dtype: torch.dtype = torch.float32) -> tuple:
    basis = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64))[0]
    return torch.randn(2, 3, 5, 24).to(dtype), basis.to(dtype), [21, 3], [4, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_basis_quantize_per_token__is_its_parts(dtype: torch.dtype) -> None:
    x, basis, widths, bits = operands(dtype)
    want = ops.quantize_per_token(x @ basis, None, widths, bits)
    got = ops.basis_quantize_per_token(x, basis, widths, bits)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_basis_quantize_per_token__opcheck() -> None:
    torch.library.opcheck(ops.basis_quantize_per_token.default, operands())


def test_basis_quantize_per_token__checks() -> None:
    x, basis, widths, bits = operands()
    with pytest.raises(ValueError, match="a basis of"):
        ops.basis_quantize_per_token(x, basis[:3], widths, bits)
    with pytest.raises(ValueError, match="no parts of 24"):
        ops.basis_quantize_per_token(x, basis, [21], [4])
