"""The moments of queries that attention modules carry: found, taken away, and given back."""

import torch
from torch import nn

from mmqc.kv.query_moment import CHILD, QueryMoment, forget, moment_of, restorer


def model_with(*moments: float | None) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in moments))
    for module, value in zip(model, moments, strict=True):
        if value is not None:
            module.add_module(CHILD, QueryMoment(1, 2))
            module.get_submodule(CHILD).moment.fill_(value)
    return model


def test_moment__is_saved_with_its_module() -> None:
    model, other = model_with(3.0, None), model_with(0.0, None)
    assert f"0.{CHILD}.moment" in model.state_dict()
    other.load_state_dict(model.state_dict())
    assert torch.equal(moment_of(other[0]), torch.full((1, 2, 2), 3.0))
    assert moment_of(other[1]) is None


def test_restorer__gives_back_what_there_was_and_takes_what_came_later() -> None:
    model = model_with(3.0, None)
    restore, known = restorer(model), moment_of(model[0])
    forget(list(model.modules()))
    assert all(moment_of(m) is None for m in model)
    for module in model:
        module.add_module(CHILD, QueryMoment(1, 2))
    restore()
    assert moment_of(model[0]) is known
    assert moment_of(model[1]) is None
