"""Gate, up and what follows of a few dozen rows, 4-bit weights: the reference's numbers, whatever ran before in the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmqc.ops.scaled_matmul_epilogue import activated

gated = pytest.importorskip("mmqc.kernels.warpgroup.packed_gated")
from mmqc.kernels.matmul import scaled_matmul_epilogue as kernel  # noqa: E402
from mmqc.kernels.matmul.epilogue_tiles import Epilogue  # noqa: E402
from mmqc.kernels.matmul.linears import Linear  # noqa: E402
from mmqc.kernels.shared.row_scale import row_scale  # noqa: E402

pytestmark = pytest.mark.gpu
SIZES = [
    (17, 272, 288), (32, 4864, 896), (33, 528, 3584), (63, 1008, 160), (64, 18944, 3584), (64, 14784, 8192), (65, 272, 288),
    (300, 528, 896),
]  # fmt: skip


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_scaled_matmul_epilogue__equals_its_parts(m: int, n: int, k: int, bias: bool, codes: bool, activation: str) -> None:
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
    weights = [torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda") for _ in range(2)]
    scales = [(torch.rand(n, device="cuda") + 0.5) / (600 * k**0.5) for _ in range(2)]
    biases: list[Any] = [torch.randn(n, device="cuda").bfloat16() if bias else None for _ in range(2)]
    visual = torch.rand(m, device="cuda") < 0.5
    of_x, of_y = torch.tensor([1.0, 0.7], device="cuda"), torch.tensor([0.02, 0.03], device="cuda")
    expected = activated(torch.ops.mmqc.scaled_matmuls(x, weights, of_x, scales, biases, visual, 4, torch.bfloat16), activation)
    if codes:
        expected = torch.ops.mmqc.quantize(expected, of_y, visual, 8)
    y = torch.empty(m, n, dtype=expected.dtype, device="cuda")
    linears = [Linear(w, s, b, y) for w, s, b in zip(weights, scales, biases, strict=True)]
    assert [p.kernel for p in kernel.plan(x, linears, torch.bfloat16)][-1] == ("gated" if gated.takes(m) else "pass")
    epilogue = Epilogue(activation, torch.bfloat16, row_scale(of_y, m, visual) if codes else None)
    for _ in range(3):  # sums in memory are zero again
        y.fill_(-77 if codes else float("nan"))
        kernel.scaled_matmul_epilogue(x, linears, row_scale(of_x, m, visual), epilogue)
        off = (y.float() - expected.float()).abs()
        assert float(off.max()) <= (1 if codes else 0.02 * float(expected.abs().max()))  # a rounding at a tie
        assert float((off > 0).float().mean()) < 2e-3
