"""One compiled model and batches of many sizes in any order, none and one row among them: each as in eager mode."""

import copy
import random
from typing import Any

import pytest
import torch
from float64 import relative_error
from often import often
from torch import Tensor, nn

import mmqc
from mmqc import recipes

SHAPES = [(0, 6), (2, 0), (1, 1), (16, 3), (1, 7), (16, 13), (3, 1), (5, 5), (2, 2), (7, 11), (1, 16), (13, 2)]
HOW = ["float", "static", "weights", "static config", "weights config"]
SAME = 1e-5


class Gated(nn.Module):
    """Norms, products of activations, a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(50, 32), nn.RMSNorm(32), nn.LayerNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.head = nn.Linear(32, 50, bias=False)

    def forward(this, ids: Tensor) -> Tensor:  # noqa: N805  (any name will do)
        x = this.embed(ids)
        h = this.norm(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return this.head(this.last(x + this.down(nn.functional.silu(this.gate(h)) * this.up(h))))


def cases(how: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """What to compile, what to compare with, and options."""
    torch.manual_seed(0)
    model = Gated().eval()
    quantized = copy.deepcopy(model)
    config = recipes.rtn(8, 8) if "static" in how else recipes.rtn(4, group_size=16)
    report = mmqc.quantize_(quantized, config, [{"ids": torch.randint(0, 50, (4, 9))}], progress=False)
    if "config" in how:
        return model, quantized, {"config": report.config}
    return (model, model, {}) if how == "float" else (quantized, quantized, {})


@torch.no_grad()
@pytest.mark.parametrize("dynamic", often((None, True), None))
@pytest.mark.parametrize("how", HOW)
def test_sizes__in_any_order(how: str, dynamic: bool | None, without_inductor: None) -> None:
    """Each in an order of its own."""
    assert_each_size_as_in_eager_mode(how, dynamic, seed=2 * HOW.index(how) + bool(dynamic))


@torch.no_grad()
@pytest.mark.parametrize("how", ["static", pytest.param("weights config", marks=pytest.mark.slow)])
def test_sizes__through_inductor(how: str) -> None:
    torch._dynamo.reset()
    assert_each_size_as_in_eager_mode(how, None, 2)


def assert_each_size_as_in_eager_mode(how: str, dynamic: bool | None, seed: int) -> None:
    """All shapes in an order of their own."""
    model, reference, options = cases(how)
    compiled = torch.compile(model, backend="mmqc", dynamic=dynamic, options=options)
    shapes = list(SHAPES)
    random.Random(seed).shuffle(shapes)
    for shape in shapes:
        ids = torch.randint(0, 50, shape)
        got, expected = compiled(ids), reference(ids)
        assert got.shape == expected.shape
        assert not got.numel() or relative_error(got, expected) < SAME
