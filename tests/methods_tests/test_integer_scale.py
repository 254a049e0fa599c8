"""Whole models with integer group scales: quantized, simulated, overflowing, compiled from the report's config."""

import copy
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from simulated import simulated_products
from small_vlm import Small, batches, logits, quantize
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.config import ConfigError, QuantConfig
from mmqc.nn.linear import QuantLinear


def linears(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def test_integer_scale__llama3_preset_on_a_vlm() -> None:
    model, batch = tiny_qwen2_vl()
    config = recipes.integer_scale(group_size=8, preset="llama3")
    report = mmqc.quantize_(model, config, [batch], progress=False)
    found = linears(model)
    assert found.keys() == {layer.fqn for layer in report.layers}
    eight = {name for name, linear in found.items() if linear.weight_bits == 8}
    assert eight == {name for name in found if "language_model" in name and name.endswith("down_proj")}
    assert eight
    assert all(linear.group_scale is not None and linear.group_size == 8 for linear in found.values())
    assert all("amplifier 8192, sums below" in layer.note for layer in report.layers)
    assert all(linear.hadamard for name, linear in found.items() if name in eight)


@pytest.mark.parametrize("amplifier", [1024, "progressive"])
def test_integer_scale__equals_simulated_products_linear_by_linear(amplifier: Any) -> None:
    model = Small()
    quantize(model, recipes.integer_scale(group_size=8, per_modality=True, amplifier=amplifier))
    wanted = torch.int8 if amplifier == "progressive" else torch.int32
    assert {m.group_scale.dtype for m in linears(model).values() if m.group_scale is not None} == {wanted}
    seen: list[Tensor] = []
    hooks = [m.register_forward_hook(lambda _, args, y: seen.append(y.clone())) for m in linears(model).values()]
    batch = batches()[0]
    expected = logits(model, batch)
    integer, seen[:] = list(seen), []
    with simulated_products() as called:
        simulated = logits(model, batch)
    assert called["scaled_matmul"].call_count == len(hooks)
    assert torch.equal(simulated, expected)
    assert len(integer) == len(seen) == len(hooks)
    assert all(torch.equal(a, b) for a, b in zip(integer, seen, strict=True))


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.rtn(4, 8, group_size=8),
        recipes.gptq(4, 8, activation_bits=8),
        recipes.awq(4, 8, activation_bits=8),
        recipes.mquant(4, group_size=8),
    ],
    ids=["rtn", "gptq", "awq", "mquant"],
)
def test_integer_scale__goes_with_every_recipe(recipe: QuantConfig) -> None:
    model = Small()
    report = quantize(model, recipe.with_integer_scales(1024))
    found = linears(model)
    assert found
    assert all(linear.group_scale is not None and linear.activation_bits == 8 for linear in found.values())
    assert all("amplifier 1024, sums below" in layer.note for layer in report.layers)
    scaled = any("channel scale in" in layer.transforms for layer in report.layers)
    assert scaled == (recipe.rewrites.scales is not None)


def test_recipes__zero_points_beside_quantized_activations_are_refused() -> None:
    for make in (recipes.gptq, recipes.awq):
        with pytest.raises(ConfigError, match=r"WeightSpec\.symmetric"):
            make(4, 8, symmetric=False, activation_bits=8)


def test_integer_scale__layers_that_could_overflow_are_listed() -> None:
    model = Small()
    name, linear = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.in_features % 8 == 0)
    with torch.no_grad():
        linear.weight.mul_(1e5)
    report = quantize(model, recipes.integer_scale(group_size=8, amplifier=2**14))
    assert linears(model)[name].group_scale is None
    listed = [str(r) for r in report.refused if "could overflow" in str(r)]
    assert len(listed) == 1
    assert name in listed[0]
    assert ">= 2^31" in listed[0]


@pytest.mark.slow
@pytest.mark.parametrize("amplifier", [None, 1024, "progressive"])
def test_integer_scale__report_config_repeats_it_in_the_backend(amplifier: Any) -> None:
    model = Small()
    plain = copy.deepcopy(model)
    report = quantize(model, recipes.integer_scale(group_size=8, amplifier=amplifier))
    compiled = torch.compile(plain, backend="mmqc", options={"config": report.config})
    batch = batches()[0]
    with torch.no_grad():
        got = logits(compiled, batch)
    expected = logits(model, batch)
    assert (got - expected).norm() / expected.norm() < 1e-2  # a code may flip at a tie
