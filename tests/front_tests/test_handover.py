"""Functions whose results are handed over: what is computed in front, what readers give, and that nothing stays in place."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from mmqc.front.handover import RUNNING, ArgumentSite, Installed, ValueSite, compute, numbers, shape_product
from mmqc.front.numbers import Numbers
from mmqc.front.places import plain
from mmqc.front.provenance import Input
from mmqc.graph.tracing import varying
from mmqc.traced import ANSWER


class Tower(nn.Module):
    """Reads sizes out of its grid."""

    def sizes(self, grid: Tensor, factor: int = 1) -> list[int]:
        return (grid.prod(-1) * factor).tolist()

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return torch.cat([part.mean(0, keepdim=True) for part in x.split(self.sizes(grid))])


def sites(tower: Tower) -> list[Any]:
    calls = [{"grid": Input("grid")}, {"grid": Input("grid"), "factor": 3}]
    return [
        ValueSite(tower, "sizes", tower.sizes, calls),
        ArgumentSite(tower, "forward", Tower.forward, {"grid": "grid"}, "one row"),
    ]


def test_compute__fills_the_table_for_one_call() -> None:
    tower, grid, number = Tower(), torch.tensor([[1, 2, 2], [1, 1, 3]]), next(numbers)
    compute(number, sites(tower), {"grid": grid})
    handed = RUNNING.table.pop(number)
    assert handed.values == [[[4, 3], [12, 9]], []]
    assert handed.arguments[0] is None
    assert handed.arguments[1][0].tolist() == [[1, 1, 7]]
    listed, known = (ArgumentSite(tower, "forward", Tower.forward, {"grid": "grid"}, form) for form in ("list", "numbers"))
    assert listed.compute({"grid": grid}) == [grid.tolist()]
    assert varying(known.compute({"grid": grid}))[0].tolist() == grid.tolist()


def test_readers__hand_over_while_compiling_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, number = Tower(), next(numbers)
    grid, other = torch.tensor([[1, 2, 2]]), torch.tensor([[1, 1, 3]])
    value, argument = sites(tower)
    compute(number, [value, argument], {"grid": grid})
    read = value.reader(number, 0)
    assert read(other) == [3], "outside a trace the function itself is called"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert read(other) == [3], "another thread compiles"
    monkeypatch.setattr(ANSWER, "traced", True)
    assert [read(other) for _ in range(3)] == [[4], [12], [3]], "what was handed over, and then the function"
    RUNNING.table.pop(number)


def test_installed__puts_readers_in_and_everything_back() -> None:
    tower, number, prod = Tower(), next(numbers), numpy.prod
    installed = Installed(number, sites(tower))
    for _ in range(2):
        installed.put()
        installed.put()
        assert set(vars(tower)) >= {"sizes", "forward"}
        assert plain(tower.sizes).__func__ is Tower.sizes
        assert numpy.prod is shape_product
        installed.remove()
        assert not {"sizes", "forward"} & set(vars(tower))
        assert numpy.prod is prod
    assert (shape_product((2, 3)), shape_product(numpy.array([2, 5]))) == (6, 10)


def test_shape_product__others_see_what_numpy_gives() -> None:
    prod, (first, second) = numpy.prod, [Installed(next(numbers), sites(Tower())) for _ in range(2)]
    first.put()
    second.put()
    values = [torch.Size([]), torch.Size([4]), (2, 3), numpy.array([2, 5])]
    assert [type(numpy.prod(v)) for v in values] == [type(prod(v)) for v in values], "safetensors asks for .item() of it"
    first.remove()
    assert numpy.prod is shape_product, "the second model's call goes on"
    second.remove()
    assert numpy.prod is prod
    first.put()
    del first, second  # a call that ended without a word
    Installed(next(numbers), sites(Tower())).remove()
    assert numpy.prod is prod


def test_compute__numbers_in_place_of_integers() -> None:
    def found(grid: Tensor) -> dict[str, Any]:
        return {"ends": grid.prod(-1).cumsum(0), "all": grid, "one": grid.sum(), "x": grid / 2, "odd": grid > 1}

    site = ValueSite({}, "found", found, [{"grid": Input("grid")}], as_numbers=True)
    (got,) = site.compute({"grid": torch.tensor([[1, 2], [3, 1]])})
    assert got["ends"].tolist() == [2, 5]
    assert got["all"].tolist() == [[1, 2], [3, 1]]
    assert all(type(got[name]) is Numbers for name in ("ends", "all"))
    assert all(isinstance(got[name], Tensor) for name in ("one", "x", "odd"))
    assert str(site) == "found(grid) as numbers"


def test_site__says_which_inputs_it_reads() -> None:
    assert str(sites(Tower())[0]) == "sizes(grid)"
