"""The norm and the static quantization in one op."""

import pytest
import torch
from norm_cases import operands
from torch.nn import functional as F

import mmqc.ops  # noqa: F401
from mmqc.nn.norm import RMSNorm

ops = torch.ops.mmqc
SCALES = {1: torch.tensor([0.03]), 2: torch.tensor([0.03, 0.05])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("scales", "bits", "code"), [(1, 8, None), (2, 4, None), (2, 8, torch.float8_e4m3fn)])
def test_norm_quantize__is_its_parts(scales, bits, code, residual, center, dtype) -> None:
    x, r, gain, bias, eps = operands(residual, dtype)
    visual = torch.rand(2, 3) < 0.5 if scales == 2 else None
    q, h = ops.norm_quantize(x, r, gain, bias, eps, center, False, SCALES[scales], visual, bits, code)
    total = x + r if residual else x
    y = F.layer_norm(total, (24,), gain, bias, eps) if center else RMSNorm(24, eps, gain, bias)(total)
    want = ops.quantize(y, SCALES[scales], visual, bits, code)
    assert q.dtype == want.dtype
    assert torch.equal(q.view(torch.int8), want.view(torch.int8))
    assert torch.equal(h, total) if residual else h.numel() == 0


def test_norm_quantize__rounds_in_front_of_the_gain_as_transformers_does() -> None:
    modeling = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    x, _, gain, _, eps = operands(False, torch.bfloat16)
    norm = modeling.Qwen2RMSNorm(24, eps)
    norm.weight = torch.nn.Parameter(gain)
    got, _ = ops.norm_quantize(x, None, gain, None, eps, False, True, SCALES[1], None, 8)
    assert torch.equal(got, ops.quantize(norm(x), SCALES[1], None, 8))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_quantize__opcheck(residual: bool, center: bool) -> None:
    given = (*operands(residual), center, True, SCALES[2], torch.rand(2, 3) < 0.5, 4)
    torch.library.opcheck(ops.norm_quantize.default, given)


def test_norm_quantize__checks() -> None:
    x, r, gain, bias, eps = operands(True)
    with pytest.raises(ValueError, match="residual is like x"):
        ops.norm_quantize(x, r[:, :1], gain, bias, eps, False, False, SCALES[1], None, 8)
    with pytest.raises(ValueError, match=r"gain has shape \[24\]"):
        ops.norm_quantize(x, r, gain[:3], bias, eps, False, False, SCALES[1], None, 8)
    with pytest.raises(ValueError, match="needs visual mask"):
        ops.norm_quantize(x, r, gain, bias, eps, False, False, SCALES[2], None, 8)


@pytest.mark.parametrize("dynamic", [False, True])
def test_norm_quantize__compiled_without_a_kernel_is_its_parts(dynamic: bool) -> None:
    from mmqc.backend import backend, collect_records

    torch._dynamo.reset()
    x, r, gain, bias, eps = operands(True)

    def function(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.norm_quantize(x, r, gain, bias, eps, True, False, SCALES[1], None, 8)

    with torch.no_grad(), collect_records() as records:
        q, h = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(x, r)
    want = function(x, r)
    assert torch.equal(h, want[1])
    off = (q.int() - want[0].int()).abs()
    assert off.max() <= 1
    assert off.sum() <= 2, "torch's LayerNorm adds in another order"
    assert not any("norm_quantize" in kernel for kernel in records[0].kernels if "fused" not in kernel)
