"""Small models whose quantized linears can share and fuse, and how a compiled one is compared with itself."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.compiler.record import collect_records
from mmqc.nn.linear import QuantLinear
from mmqc.solvers import Quantized


def linear(width: int, scale: float = 0.05, *, static: bool = True, bias: bool = True, hadamard: bool = False) -> QuantLinear:
    g = torch.Generator().manual_seed(width)
    codes = torch.randint(-128, 128, (width, 32), dtype=torch.int8, generator=g)
    return QuantLinear.from_parts(
        Quantized(codes, torch.rand(width, generator=g)),
        weight_bits=8,
        activation_bits=8 if static else None,
        bias=torch.randn(width, generator=g) if bias else None,
        input_scale=torch.tensor([scale]) if static else None,
        hadamard=hadamard,
    )


class Readers(nn.Module):
    """Several linears of one input, and one of another."""

    def __init__(self, *readers: nn.Module) -> None:
        super().__init__()
        self.readers = nn.ModuleList(readers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*(reader(x) for reader in self.readers), self.readers[0](x + 1))


class Gated(nn.Module):
    """What stands in front of a down_proj."""

    def __init__(self, down: nn.Module, act: Any = F.silu) -> None:
        super().__init__()
        self.down, self.act = down, act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(x) * (x + 1))


def compile_and_compare(model: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, list[str]]]:
    """The ops of the one graph, and what its passes refused; its result must be the model's to the bit."""
    with torch.no_grad(), collect_records() as records:
        expected = model(x)
        got = torch.compile(model, backend="mmqc", fullgraph=True)(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    (record,) = records
    return dict(record.ops), {p.name: [str(m) for m in p.misses] for p in record.passes}
