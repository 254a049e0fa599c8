"""Where a function that was called is looked up."""

import sys
from typing import Any

from torch import nn

from mmqc.front.places import Call, place_of, plain


class Model(nn.Module):
    def sizes(self) -> Any:
        return sys._getframe().f_code


def helper() -> Any:
    return sys._getframe().f_code


def test_place_of__an_attribute_of_a_module_or_a_global_of_the_caller() -> None:
    model = Model()
    owner, function = place_of(Call(model.sizes(), (), {"self": model}))
    assert owner is model
    assert function == model.sizes
    scope: dict[str, Any] = {"helper": helper}
    assert place_of(Call(helper(), ({}, scope), {})) == (scope, helper)
    assert place_of(Call(helper(), ({"helper": model.sizes},), {})) is None, "another function of that name"
    assert place_of(Call(helper(), (), {"self": model})) is None, "a method that is not looked up by its name"


def test_place_of__sees_through_a_reader() -> None:
    def reader() -> None:
        """Stands for it."""

    reader.mmqc_stands_for = helper  # type: ignore[attr-defined]
    assert plain(reader) is helper
    assert place_of(Call(helper(), ({"helper": reader},), {}))[1] is helper
