"""Kernels of generated code are launched by the functions in C from their second launch on, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import mmqc

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """Patches, a norm and quantized linears: kernels of Inductor's and of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv3d(3, 256, (2, 14, 14), stride=(2, 14, 14), bias=False)
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x.view(-1, 3, 2, 14, 14)).flatten(1)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")).sin()


def test_quick_launch__no_kernel_is_launched_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: list[str] = []
    run = CachingAutotuner.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        slow.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "run", counted)
    model = Block().eval().cuda().bfloat16()
    rows = {n: torch.randn(n, 1176, device="cuda", dtype=torch.bfloat16) for n in (40, 400, 1000, 37, 3600)}
    mmqc.quantize_(model, mmqc.recipes.rtn(8, activation_bits=8), [{"x": rows[400]}], progress=False)
    compiled: Any = torch.compile(model, backend="mmqc", dynamic=True)
    for x in rows.values():
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        for x in rows.values():
            compiled(x)
        assert slow
        slow.clear()
        for x in rows.values():
            got = compiled(x)
            assert_close(got, compiled(x))
            assert_close(got.float(), model(x).float(), torch.bfloat16)
    assert not slow
