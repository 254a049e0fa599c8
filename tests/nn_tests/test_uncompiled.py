"""A model as it is without torch.compile, for as long as it is looked at."""

import pytest
import torch
from torch import Tensor, nn

from mmqc.nn.uncompiled import uncompiled


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
