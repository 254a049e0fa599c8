"""Exported programs fused as compiled graphs are: the same codes, and inputs that are written to."""

import collections

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

import mmqc
from mmqc import recipes
from mmqc.aot.fused import fused

WIDTH, ROOM = 64, 12
AXES = {"x": {1: Dim.DYNAMIC}, "cache": {}}


class Norm(nn.Module):
    """As transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Block(nn.Module):
    """A norm, q and k of it, k into a cache, another norm, a gate, and the head that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.RMSNorm(WIDTH, eps=1e-6), Norm()
        self.q, self.k, self.gate, self.up = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.down, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        torch._assert_async((x == x).all(), "x holds NaN")
        h = self.norm(x)
        cache[:, : x.shape[1]] = self.k(h)
        h = x + F.scaled_dot_product_attention(self.q(h), cache, cache)
        y = self.other(h)
        return self.head(h + self.down(F.silu(self.gate(y)) * self.up(y)))


def inputs(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {"x": torch.randn(2, length, WIDTH, generator=generator), "cache": torch.zeros(2, ROOM, WIDTH)}


def ops(program: ExportedProgram) -> collections.Counter[str]:
    return collections.Counter(str(n.target).split(".")[1] for n in program.graph.nodes if str(n.target).startswith("mmqc."))


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    model = Block().eval()
    mmqc.quantize_(model, recipes.rtn(4, 8), calibration=[inputs(5)], progress=False)
    return model


@torch.no_grad()
def test_fused__is_the_model_and_what_it_writes(block: nn.Module) -> None:
    plain = export(block, (), inputs(5), dynamic_shapes=AXES)
    program = fused(plain).run_decompositions({})
    assert ops(plain) == {"quantize": 5, "scaled_matmul": 5}
    assert ops(program) == {"norm_quantize": 2, "scaled_matmuls": 1, "scaled_matmul": 1, "scaled_matmul_epilogue": 1}
    for length in (5, 2, 11):
        one, other = inputs(length), inputs(length)
        assert_close(program.module()(**one), block(**other))
        assert_close(one["cache"], other["cache"])
        assert other["cache"].any()
    with pytest.raises(RuntimeError, match="x holds NaN"):
        program.module()(**{**inputs(5), "x": torch.full((2, 5, WIDTH), torch.nan)})


def test_fused__leaves_the_program_that_it_was_given(block: nn.Module) -> None:
    with torch.no_grad():
        plain = export(block, (), inputs(5), dynamic_shapes=AXES)
    before = str(plain.graph)
    assert fused(plain) is not plain
    assert str(plain.graph) == before


def test_fused__has_nothing_to_do_in_floating_point() -> None:
    program = export(Block().eval(), (), inputs(5), dynamic_shapes=AXES)
    assert fused(program) is program
