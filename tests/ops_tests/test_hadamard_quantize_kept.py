"""Codes of a transform and some of its channels in one op."""

import pytest
import torch
from torch.nn import functional as F

import mmqc.ops  # noqa: F401
from mmqc.ops.hadamard_matrix import hadamard_factors

ops = torch.ops.mmqc


def operands(gated: bool, masked: bool) -> tuple:
    x, up = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    visual = torch.rand(2, 3) > 0.5 if masked else None
    kept = torch.tensor([23, 0, 7])
    return (
        x,
        up if gated else None,
        [f.float() for f in hadamard_factors(24)],
        kept,
        0.01 + torch.rand(1 + masked) * 0.05,
        visual,
        8,
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_hadamard_quantize_kept__is_its_parts(gated: bool, masked: bool) -> None:
    x, up, factors, kept, *rest = operands(gated, masked)
    y = ops.hadamard(x if up is None else F.silu(x) * up, factors)
    q, some = ops.hadamard_quantize_kept(x, up, factors, kept, *rest)
    assert torch.equal(q, ops.quantize(y, *rest))
    assert torch.equal(some, y[..., kept])


@pytest.mark.parametrize("gated", [False, True])
def test_hadamard_quantize_kept__opcheck(gated: bool) -> None:
    torch.library.opcheck(ops.hadamard_quantize_kept.default, operands(gated, True))


def test_hadamard_quantize_kept__checks() -> None:
    x, up, factors, kept, *rest = operands(True, False)
    with pytest.raises(ValueError, match="one shape"):
        ops.hadamard_quantize_kept(x, up[:, :1], factors, kept, *rest)
    with pytest.raises(ValueError, match="int64 vector"):
        ops.hadamard_quantize_kept(x, up, factors, kept.int(), *rest)
