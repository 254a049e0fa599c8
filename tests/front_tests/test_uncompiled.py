"""Parts of a model are compiled by themselves, and the forward that is watched is none of them.  Inductor is left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from float64 import relative_error
from models import tiny_qwen2_vl
from prompts import batch_of
from torch import Tensor, nn

from mmqc.backend import collect_records
from mmqc.front.front import attached
from mmqc.front.uncompiled import uncompiled

GRIDS = ((1, 4, 6), (1, 8, 4)), ((1, 4, 4), (1, 6, 4), (1, 2, 4)), ((1, 10, 4), (1, 2, 2))
SAME = 1e-5  # float32; the same sums in another order


def compiled_forward(part: nn.Module) -> None:
    part.forward = torch.compile(part.forward, backend="mmqc")


def in_place(part: nn.Module) -> None:
    part.compile(backend="mmqc")


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
    with collect_records() as records:
        actual = logits(torch.compile(model, backend="mmqc"), batch)
    assert len(records) == 1
    assert relative_error(actual, expected) < SAME


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


class Counted(nn.Module):
    """Says how it was called."""

    def forward(self, x: Tensor) -> Tensor:
        self.compiled = torch.compiler.is_compiling()
        return x + 1


def test_uncompiled__every_module_is_as_it_was_handed_over_and_then_as_it_was() -> None:
    model = nn.Sequential(Counted(), Counted(), Counted(), Counted())
    model[0].forward = torch.compile(model[0].forward, backend="eager")
    model[1].compile(backend="eager")
    model[2] = torch.compile(model[2], backend="eager")
    before = [dict(vars(module)) for module in model.modules()]
    with uncompiled(model):
        assert model(torch.zeros(2)).tolist() == [4.0, 4.0]
        assert not any(module.compiled for module in model.modules() if isinstance(module, Counted))
    assert [{k: v for k, v in vars(m).items() if k != "compiled"} for m in model.modules()] == before
    assert model(torch.zeros(2)).tolist() == [4.0, 4.0]
    assert [module.compiled for module in model.modules() if isinstance(module, Counted)] == [True, True, True, False]


def test_uncompiled__modules_are_as_they_were_after_an_error() -> None:
    model = Counted()
    model.forward = compiled = torch.compile(model.forward, backend="eager")
    with pytest.raises(ValueError, match="inside"), uncompiled(model):
        raise ValueError("inside")
    assert model.forward is compiled
