"""Norms that rotate at run time: as modules, written back, saved and loaded."""

import copy

import pytest
import torch
from models import randomise
from torch import nn

from mmqc.checkpoint.module_spec import build_module, module_spec
from mmqc.graph.changes import Turned
from mmqc.nn.norm import RMSNorm
from mmqc.nn.rotated_norm import RotatedNorm

N = 24
SIDES = [{"after": True}, {"after": False}, {"before": True}, {"before": False}, {"before": False, "after": True}]


def matrix(keep_mean: bool | None) -> torch.Tensor:
    eye = torch.eye(N, dtype=torch.float64)
    return eye if keep_mean is None else Turned.of(N, 5, keep_mean)(eye)


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("kind", ["layer", "layer_without_bias", "rms"])
def test_rotated_norm__forward(kind: str, sides: dict[str, bool]) -> None:
    kinds = {
        "layer": lambda: nn.LayerNorm(N),
        "layer_without_bias": lambda: nn.LayerNorm(N, bias=False),
        "rms": lambda: RMSNorm(N, 1e-5, nn.Parameter(torch.ones(N)), nn.Parameter(torch.zeros(N))),
    }
    norm = randomise(kinds[kind]()).double()
    x = torch.randn(3, 5, N, dtype=torch.float64)
    bias = 0 if norm.bias is None else norm.bias
    if not isinstance(norm, RMSNorm) and "before" in sides:
        sides = {**sides, "before": True}  # a LayerNorm passes no other
    given = x @ matrix(sides.get("before"))
    got = RotatedNorm(copy.deepcopy(norm), seed=5, **sides)(given)
    torch.testing.assert_close(got, (norm(x) - bias) @ matrix(sides.get("after")) + bias)


@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_rotated_norm__spec_round_trip(sides: dict[str, bool]) -> None:
    module = RotatedNorm(randomise(nn.LayerNorm(N)), seed=5, **sides)
    again = build_module(module_spec(module)).to_empty(device="cpu")
    again.load_state_dict(module.state_dict())
    again.rebuild_factors(torch.device("cpu"))
    x = torch.randn(3, N)
    assert torch.equal(again(x), module(x))
    assert repr(again) == repr(module)
    assert set(module.state_dict()) == {"weight", "bias"}


def test_rotated_norm__factors_are_rebuilt_in_another_dtype() -> None:
    module = RotatedNorm(randomise(nn.LayerNorm(N)), seed=5, after=True)
    assert module.bfloat16().get_buffer("mirror").dtype == torch.float32
    assert torch.equal(module.double().get_buffer("mirror"), RotatedNorm(nn.LayerNorm(N).double(), seed=5, after=True).mirror)
