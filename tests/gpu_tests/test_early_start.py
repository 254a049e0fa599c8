"""Kernels that start before the one in front has ended give what they give one after the other, in any number of replays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mmqc.backend import backend
from mmqc.kernels.shared.early_start import early_lines
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.ops.pack import pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAYERS, K, N = 12, 512, 1536


class Layer(nn.Module):
    """A norm, a gate, a transform or none, and a product in W4A8, a residual, and a counter that every call moves."""

    def __init__(self, transform: bool) -> None:
        super().__init__()
        self.factors = nn.ParameterList(hadamard_factors(N) if transform else ()).requires_grad_(False).float()
        for name, rows, columns in (("gate", N, K), ("up", N, K), ("down", K, N)):
            self.register_buffer(name, pack(torch.randint(-8, 8, (rows, columns), dtype=torch.int8), 4))
            self.register_buffer(f"{name}_scale", torch.rand(rows) * 0.01 + 0.001)
        self.register_buffer("scale", torch.tensor([0.05]))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops.mmqc
        h = nn.functional.rms_norm(x, (K,)) + self.calls.to(x.dtype) * 2**-6
        x_q = ops.quantize(h, self.scale, None, 8)
        scales = [self.gate_scale, self.up_scale]
        gate, up = ops.scaled_matmuls(x_q, [self.gate, self.up], self.scale, scales, [None, None], None, 4, x.dtype)
        inner = nn.functional.silu(gate) * up
        if len(self.factors):
            inner = ops.hadamard(inner, list(self.factors))
        inner = ops.quantize(inner, self.scale, None, 8)
        y = ops.scaled_matmul(inner, self.down, self.scale, self.down_scale, None, None, 4, x.dtype)
        self.calls.add_(1)
        return x + y


@pytest.mark.parametrize("rows", [1, 4, 16, 60])
def test_early_start__replays_are_what_launches_one_by_one_give(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(transform=i % 2 == 1) for i in range(LAYERS))).cuda()
    early, plain = (copy.deepcopy(model) for _ in range(2))
    assert early_lines(torch.device("cuda:0"), 8) > 0 or torch.cuda.get_device_capability() < (9, 0)
    early.compile(backend=backend, options={"mode": "reduce-overhead"})
    plain.compile(backend=backend)
    with torch.no_grad():
        for step in range(400):
            x = torch.randn(rows, K, device="cuda").bfloat16()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(early(x), plain(x)), f"step {step}"
