"""The norm and the quantization in one op."""

import pytest
import torch
from norm_cases import operands

import mmqc.ops  # noqa: F401
from mmqc.nn.norm import RMSNorm

ops = torch.ops.mmqc
WIDTHS, BITS = [15, 6, 3], [2, 4, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_quantize_per_token__is_its_parts(residual: bool, ordered: bool, dtype: torch.dtype) -> None:
    x, r, gain, bias, eps = operands(residual, dtype)
    order = torch.randperm(24) if ordered else None
    q, s, o, h = ops.norm_quantize_per_token(x, r, gain, bias, eps, False, order, WIDTHS, BITS)
    total = x + r if residual else x
    want = ops.quantize_per_token(RMSNorm(24, eps, gain, bias)(total), order, WIDTHS, BITS)
    assert all(torch.equal(a, b) for a, b in zip((q, s, o), want, strict=True))
    assert torch.equal(h, total) if residual else h.numel() == 0


def test_norm_quantize_per_token__rounds_in_front_of_the_gain_as_transformers_does() -> None:
    modeling = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    x, _, gain, _, eps = operands(False, torch.bfloat16)
    norm = modeling.Qwen2RMSNorm(24, eps)
    norm.weight = torch.nn.Parameter(gain)
    got = ops.norm_quantize_per_token(x, None, gain, None, eps, True, None, WIDTHS, BITS)
    want = ops.quantize_per_token(norm(x), None, WIDTHS, BITS)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=False))


@pytest.mark.parametrize("residual", [False, True])
def test_norm_quantize_per_token__opcheck(residual: bool) -> None:
    given = (*operands(residual), True, torch.randperm(24), WIDTHS, BITS)
    torch.library.opcheck(ops.norm_quantize_per_token.default, given)


def test_norm_quantize_per_token__checks() -> None:
    x, r, gain, bias, eps = operands(True)
    with pytest.raises(ValueError, match="residual is like x"):
        ops.norm_quantize_per_token(x, r[:, :1], gain, bias, eps, False, None, WIDTHS, BITS)
    with pytest.raises(ValueError, match=r"gain has shape \[24\]"):
        ops.norm_quantize_per_token(x, r, gain[:3], bias, eps, False, None, WIDTHS, BITS)
    with pytest.raises(ValueError, match="no parts of 24"):
        ops.norm_quantize_per_token(x, r, gain, bias, eps, False, None, [23], [4])
