"""On the CPU a compiled graph that rounds activations computes what eager does, to the bit."""

import contextlib
import copy

import pytest
import torch
from often import often
from torch import nn

import mmqc
from mmqc.lowering import torch_kernels

ROWS = 20_000  # so many that some value lies within an ulp of a tie


class Mlp(nn.Module):
    """What stands in front of a vision tower's quantized linears."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = norm, nn.Linear(48, 64), nn.Linear(64, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def differing(norm: nn.Module) -> int:
    """Entries that are not what eager gives."""
    torch.manual_seed(0)
    model = Mlp(norm).eval()
    mmqc.quantize_(model, mmqc.recipes.rtn(8, 8).replace(keep=()), [{"x": torch.randn(64, 48)}], progress=False)
    x = torch.randn(ROWS, 48)
    torch._dynamo.reset()
    compiled = copy.deepcopy(model)
    compiled.compile(backend="mmqc")
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        return int((compiled(x) != model(x)).sum())


@pytest.mark.parametrize("norm", often((nn.LayerNorm, nn.RMSNorm), nn.RMSNorm))
def test_torch_kernels__equal_to_the_bit(norm: type[nn.Module]) -> None:
    assert differing(norm(48)) == 0


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="elsewhere Inductor's norm may be torch's")
def test_torch_kernels__without_them_codes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "torch_kernels", contextlib.nullcontext)
    assert differing(nn.LayerNorm(48)) > 0
