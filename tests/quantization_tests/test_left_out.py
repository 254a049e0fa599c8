"""Every linear is quantized or named; where none is quantized, that is an error, and the model is as it was."""

from typing import Any

import pytest
import torch
import torchao.quantization
from small_vlm import Small, batches, check_unchanged, traces
from torch import nn

import mmqc
from mmqc import recipes
from mmqc.config import QuantConfig
from mmqc.errors import MmqcError
from mmqc.nn.linear import HadamardLinear
from mmqc.quantization.left_out import NothingQuantizedError


def nothing(*args: object) -> bool:
    return False


@pytest.mark.parametrize("data", [None, batches()], ids=["without data", "calibrated"])
@pytest.mark.parametrize(
    ("config", "filter_fn", "reason"),
    [
        (recipes.rtn(8).replace(keep=("*",)), None, r"Linear, e\.g\. .*: .*kept in floating point \(\*\)"),
        (recipes.rtn(8), nothing, r"Linear, e\.g\. .*: filter_fn leaves it out"),
    ],
)
def test_left_out__nothing_is_an_error(data: Any, config: QuantConfig, filter_fn: Any, reason: str) -> None:
    model = Small().train()
    before = traces(model)
    with pytest.raises(NothingQuantizedError, match=f"(?s)nothing would be quantized.*{reason}.*allow_nothing=True") as error:
        mmqc.quantize_(model, config, data, filter_fn=filter_fn, progress=False)
    assert isinstance(error.value, MmqcError)
    assert isinstance(error.value, ValueError)
    check_unchanged(model, before)


@pytest.mark.parametrize("data", [None, batches()], ids=["without data", "calibrated"])
def test_left_out__unless_it_is_allowed(data: Any) -> None:
    report = mmqc.quantize_(Small(), recipes.rtn(8), data, filter_fn=nothing, allow_nothing=True, progress=False)
    linears = {n for n, m in Small().named_modules() if isinstance(m, nn.Linear)}
    assert report.layers == []
    assert {r.fqn for r in report.refused} >= linears


def test_left_out__model_without_linears() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1))
    with pytest.raises(NothingQuantizedError, match="Sequential has no module that computes x Wᵀ"):
        mmqc.quantize_(model, recipes.rtn(8), progress=False)


def test_left_out__a_config_that_only_rewrites_asks_for_no_weights() -> None:
    report = mmqc.quantize_(Small(), recipes.rotate(), batches(), progress=False)
    assert report.layers == []


class Branching(nn.Module):
    """One linear that is used, one that no call reaches, one with a residual inside, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.inner, self.router = nn.Linear(8, 8), nn.Linear(8, 8), Residual(8, 8), Router()

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        y = self.used(x) * self.router(x)[0]
        return self.inner(self.unused(y) if other else y)


class Residual(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return nn.functional.linear(x, self.weight), 1


@pytest.mark.parametrize("calibrated", [False, True])
def test_left_out__each_is_named_once_with_its_reason(calibrated: bool) -> None:
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(4, 8)
    expected = model(x)
    report = mmqc.quantize_(model, recipes.rtn(8).replace(keep=()), [{"x": x}] if calibrated else None, progress=False)
    assert (model(x) - expected).norm() / expected.norm() < 0.02
    assert [layer.fqn for layer in report.layers] == (["used"] if calibrated else ["used", "unused"])
    reasons = {r.fqn: r.reason for r in report.refused}
    assert len(reasons) == len(report.refused)
    assert "Residual has a forward of its own that does more than" in reasons.pop("inner")
    assert "Router has a forward of its own that does more than" in reasons.pop("router")
    assert reasons == ({"unused": "no recorded batch reached it"} if calibrated else {})


@pytest.mark.parametrize("calibrated", [False, True])
def test_left_out__what_torchao_quantized_is_named_and_goes_on(calibrated: bool) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(4, 32)
    torchao.quantization.quantize_(model[0], torchao.quantization.Int8WeightOnlyConfig())
    expected = model(x)
    data = [{"input": x}] if calibrated else None
    report = mmqc.quantize_(model, recipes.rtn(8).replace(keep=()), data, progress=False)
    assert [layer.fqn for layer in report.layers] == ["2"]
    assert [r.fqn for r in report.refused] == ["0"]
    assert "not a plain tensor: quantized or sharded already" in report.refused[0].reason
    assert (model(x) - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("data", [None, batches()], ids=["without data", "calibrated"])
def test_left_out__online_hadamards_of_an_earlier_call_are_named(data: Any) -> None:
    model = Small()
    mmqc.quantize_(model, recipes.rotate(), batches(), progress=False)
    report = mmqc.quantize_(model, recipes.rtn(8), data, progress=False)
    named = {r.fqn for r in report.refused if "an online Hadamard of an earlier call" in r.reason}
    assert named == {n for n, m in model.named_modules() if isinstance(m, HadamardLinear)}
    assert len(named) == 3
