"""What a user compiles, the model or a part of it, and how: one graph.  Inductor is left out."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from float64 import relative_error
from models import tiny_qwen2_vl
from prompts import batch_of
from torch import Tensor, nn

import mmqc
from mmqc.backend import collect_records
from mmqc.front.front import attached

GRIDS = ((1, 4, 6), (1, 8, 4)), ((1, 4, 4), (1, 6, 4), (1, 2, 4)), ((1, 10, 4), (1, 2, 2))
SAME = 1e-5  # float32; the same sums in another order


def compiled_forward(part: nn.Module) -> nn.Module:
    part.forward = torch.compile(part.forward, backend="mmqc")
    return part


def in_place(part: nn.Module) -> nn.Module:
    part.compile(backend="mmqc")
    return part


def whole(model: nn.Module) -> nn.Module:
    return model


def inner(model: nn.Module) -> nn.Module:
    return model.model


def tower(model: nn.Module) -> nn.Module:
    return model.model.visual


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch, use_cache=False).logits


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("compile_", [compiled_forward, in_place])
@pytest.mark.parametrize("part", [whole, inner, tower])
def test_front__what_is_compiled_is_one_graph_whoever_calls_it(part: Callable[..., Any], compile_: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    batches = [batch_of(*grids) for grids in GRIDS]
    expected = [logits(model, batch) for batch in batches]
    with collect_records() as records:
        compile_(part(model))
        actual = [logits(model, batch) for batch in batches]
    assert len(records) == 1
    assert max(map(relative_error, actual, expected)) < SAME
    assert [module for module in model.modules() if attached(module) is not None] == [part(model)]


@pytest.mark.usefixtures("without_inductor")
def test_front__a_part_that_was_compiled_before_the_whole_does_not_end_its_graph() -> None:
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1, layers=1)
    expected = logits(model, batch)
    in_place(tower(model))
    assert relative_error(logits(model, batch), expected) < SAME
    front = attached(tower(model))
    assert front is not None
    inputs = {"hidden_states": batch["pixel_values"], "grid_thw": batch["image_grid_thw"]}
    front.prepare(tower(model), inputs, sys._getframe())  # as another thread's call
    assert front.active is not None
    with collect_records() as records:
        actual = logits(torch.compile(model, backend="mmqc"), batch)
    assert len(records) == 1
    assert relative_error(actual, expected) < SAME
    assert front.active is None, "what was put in place for that call would stay"


@pytest.mark.usefixtures("without_inductor")
def test_front__layers_that_are_compiled_one_by_one_have_no_hooks() -> None:
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1, layers=2)
    expected = logits(model, batch)
    for layer in model.model.language_model.layers:
        in_place(layer)
    with collect_records() as records:
        assert relative_error(logits(model, batch), expected) < SAME
    assert records
    assert not any(attached(module) for module in model.modules())


def in_a_wrapper(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="mmqc")


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("compile_", [compiled_forward, in_place, in_a_wrapper])
def test_quantize__a_compiled_model_is_quantized_as_itself_and_compiles_anew(compile_: Callable[..., Any]) -> None:
    (model, batch), (plain, _) = (tiny_qwen2_vl(depth=1, layers=1) for _ in range(2))
    given = compile_(model)
    before = logits(given, batch)
    for one in (given, plain):
        mmqc.quantize_(one, mmqc.recipes.mquant(8), [batch], progress=False)
    assert state(model).keys() == state(plain).keys()
    assert all(torch.equal(tensor, state(plain)[name]) for name, tensor in state(model).items())
    with collect_records() as records:
        actual = logits(given, batch)
    assert [record.quantized for record in records] == [True]
    assert relative_error(actual, logits(plain, batch)) < SAME < relative_error(actual, before)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("compile_", [compiled_forward, in_place, in_a_wrapper])
def test_explain__a_compiled_model_is_compiled_again_to_be_told_of(compile_: Callable[..., Any]) -> None:
    model, batch = tiny_qwen2_vl(depth=1, layers=1)
    told = mmqc.explain(compile_(model), {**batch, "use_cache": False})
    assert len(told.graphs) == 1
    assert not told.breaks
