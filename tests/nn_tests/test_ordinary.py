"""Calls in inference mode, under autocast or with another default device do what they do without."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES
from torch import nn

import mmqc
from mmqc import recipes
from mmqc.nn.ordinary import ordinary, with_ordinary_tensors

AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),  # the only other one everywhere; nothing that is made there has values
}


def quantized(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mmqc.quantize_(model, recipes.mquant(4), calibration=[batch], progress=False)
    return model.state_dict()


@pytest.mark.parametrize("name", AROUND)
def test_quantize__has_the_same_codes(name: str) -> None:
    (model, batch), (other, _) = FAMILIES["qwen2_vl"](), FAMILIES["qwen2_vl"]()
    expected = quantized(other, batch)
    with AROUND[name]():
        found = quantized(model, batch)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert not any(tensor.is_inference() for tensor in found.values())


def test_plan__of_a_process_with_another_default_device() -> None:
    model, batch = FAMILIES["llava"]()
    plans = [mmqc.plan(model, recipes.mquant(4), batch)]
    with AROUND["default device"]():
        plans.append(mmqc.plan(model, recipes.mquant(4), batch))
    first, second = (re.sub(r"[\d.]+ m?s\b|\s", "", str(plan)) for plan in plans)  # but for how long it took
    assert first == second


def test_ordinary__until_its_end() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        with ordinary():
            assert torch.zeros(2).device.type == "cpu"
            assert (torch.zeros(2, 2) @ torch.zeros(2, 2)).dtype == torch.float32
            assert not torch.zeros(2).is_inference()
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_device().type == "meta"


def test_with_ordinary_tensors__tied_ones_stay_tied() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].weight = model[0].weight
    own = nn.Linear(2, 2)
    model.append(own)
    kept, before = own.weight, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with_ordinary_tensors(model)
    assert model[1].weight is model[0].weight
    assert own.weight is kept
    model[0].weight.requires_grad_(False).zero_()  # cannot be written to, in inference mode's
    del before["0.weight"], before["1.weight"]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
