"""RoPE's table is computed once, and read by every layer; equal to the bit."""

from typing import Any

import pytest
import torch
from fusion_cases import compile_and_compare, linear
from torch import Tensor, nn

from mmqc.compiler.record import collect_records

WIDTH = 32


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does, with a dimension for the heads."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.q, self.k, self.cast = linear(WIDTH), linear(16), cast

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.cast:  # as vision towers do, to the dtype that they have
            cos, sin = cos.float(), sin.float()
        q, k = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return x + (q * k.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Layers behind one table: of sections of three positions, or of a doubled one."""

    def __init__(self, layers: int, sections: bool, cast: bool = False) -> None:
        super().__init__()
        self.layers, self.sections = nn.ModuleList(Layer(cast) for _ in range(layers)), sections

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], device=x.device).float()
        positions = torch.stack((steps, steps * 2, steps * 3))[:, None, None]
        angles = (torch.tensor([1.0, 0.1, 0.01, 0.001])[None, None, :, None] * positions).transpose(2, 3)
        if self.sections:
            tables: Any = [(f(angles) * 1.0).split([1, 2, 1], -1) for f in (torch.cos, torch.sin)]
            tables = [torch.cat([part[i] for i, part in enumerate(t)], -1) for t in tables]
            cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in tables)
        else:
            both = torch.cat((angles[0], angles[0]), -1)
            cos, sin = both.cos().to(x.dtype), both.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("sections", [False, True])
def test_share_angles__of_two_layers(sections: bool, cast: bool, without_inductor: None) -> None:
    ops, _ = compile_and_compare(Model(2, sections, cast), torch.randn(2, 5, WIDTH))
    assert ops["materialize"] == 2
    torch._dynamo.reset()
    ops, _ = compile_and_compare(Model(1, sections, cast), torch.randn(2, 5, WIDTH))
    assert "materialize" not in ops, "q and k of one layer share a kernel"


def test_share_angles__one_kernel_writes_the_table() -> None:
    torch._dynamo.reset()
    model, x = Model(3, True), torch.randn(2, 5, WIDTH)
    with torch.no_grad(), collect_records() as records:
        got = torch.compile(model, backend="mmqc", fullgraph=True)(x)
        torch.testing.assert_close(got, model(x))
    # A kernel's name has its operations in it; "split_with_sizes" is the table's alone.
    for word in ("materialize", "split_with_sizes"):
        assert len([name for record in records for name in record.kernels if word in name]) == 1
