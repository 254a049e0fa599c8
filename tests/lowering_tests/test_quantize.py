"""quantize through Inductor: equal to eager, and one node with what stands in front of it."""

from collections import Counter

import torch
from compiled_ops import check_compiled

ops = torch.ops.mmqc


def test_lower_quantize__all_of_one_norm_in_one_kernel() -> None:
    """The norm's sum and root are torch's own on the CPU (torch_kernels.py); what is behind them is one kernel."""
    s2, visual = torch.tensor([0.02, 0.05]), torch.rand(2, 9) > 0.5

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.rms_norm(x, (100,))
        return ops.quantize(y, s2, visual, 8), ops.quantize(y, s2[:1], None, 4), ops.quantize(x, s2[1:], None, 8)

    _, record = check_compiled(function, torch.randn(2, 9, 100))
    assert record.kernels[-1].startswith("cpp_fused_mul_quantize")
    assert not any("quantize" in name for name in record.kernels[:-1])
    assert {name for name in record.kernels if name.startswith("extern")} <= {"extern aten.mean", "extern aten.rsqrt"}
    assert record.ops == Counter(quantize=3)


def test_lower_quantize__low_precision_input() -> None:
    s1 = torch.tensor([0.02])
    check_compiled(lambda x: (ops.quantize(x, s1, None, 8),), torch.randn(3, 100, dtype=torch.bfloat16))
