"""Recipes of tensors: what they give for other inputs, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmqc.front.observe import observe
from mmqc.front.provenance import Input, Provenance, Returned, follow, leaves, parts, whole_numbers

GIVEN = {"mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]), "x": torch.randn(2, 4)}
OTHER = {"mask": torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]), "x": torch.randn(2, 4)}
COUNTED: list[str] = []


def taken(x: Tensor, lengths: Tensor) -> dict[str, Any]:
    """Written to in between: no operation says what it is, but the function does."""
    COUNTED.append("taken")
    ends = torch.zeros(3, dtype=torch.long)
    ends[1:] = lengths.cumsum(0)
    return {"ends": ends, "rows": [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)]}


def last(ends: Tensor) -> Tensor:
    return torch.full((int(ends[-1]),), 2)


def noted(x: Tensor) -> Tensor:
    return x


def forward(mask: Tensor, x: Tensor) -> Tensor:
    found = taken(x * 2, mask.sum(-1))
    return last(found["ends"]) * found["rows"][0].sum()


def recipe_of(name: str) -> Any:
    """What the arguments of a function were made of."""
    seen = observe(lambda: forward(**GIVEN), frozenset(), GIVEN)
    (call,) = (c for c in seen.calls if c.code.co_name == name)
    return call.recipe


def test_follow__gives_what_the_forward_would_for_other_inputs() -> None:
    recipe = recipe_of("last")
    assert {leaf.name for leaf in leaves(recipe)} == {"mask", "x"}
    assert follow(recipe, OTHER, {})["ends"].tolist() == [0, 1, 5]
    given = follow(recipe_of("taken"), OTHER, {})
    assert given["lengths"].tolist() == [1, 4]
    assert torch.equal(given["x"], OTHER["x"] * 2)


def test_follow__computes_nothing_twice() -> None:
    recipe, known = recipe_of("last"), dict[int, Any]()
    COUNTED.clear()
    for _ in range(2):
        follow([recipe, recipe], OTHER, known)
    assert COUNTED == ["taken"]


def test_leaves__are_the_inputs_that_a_recipe_names() -> None:
    assert list(leaves({"a": [Input("x"), 3], "b": (Input("y"),)})) == [Input("x"), Input("y")]
    assert list(parts(3)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.rand_like(x),
        lambda x: torch.empty_like(x),
        lambda x: x + torch.ones(2, 4),  # a tensor of which nobody knows
        lambda x: torch.cat([x] * 5),  # large
        lambda x: (x * 1).add_(1),
        lambda x: x.view(4, -1),  # sizes of this batch, and not of the next one
        lambda x: x.expand(3, *x.shape),
        lambda x: x[:, : x.shape[1]],
        lambda x: torch.cat([x] * 3)[-6:],
        lambda x: torch.nn.functional.pad(x, (0, 7)),
        lambda x: x[1],  # there may be one row the next time
        lambda x: x[1, :2],
        lambda x: x.unbind(0)[1],
        lambda x: list(x)[1],
        lambda x: x.split([1, 1])[0],
    ],
)
def test_provenance__what_has_no_recipe(make: Callable[[Tensor], Tensor]) -> None:
    kept = []

    def run() -> None:
        kept.append(make(GIVEN["x"]))
        noted(kept[0])

    seen = observe(run, frozenset(), GIVEN)
    (call,) = (c for c in seen.calls if c.code.co_name == "noted")
    assert call.recipe is None


def test_provenance__a_size_of_the_batch_goes_into_no_recipe() -> None:
    """Numbers that are not: dimensions, and what is configured."""
    given = {"ids": torch.zeros(2, 9, dtype=torch.long), "x": torch.zeros(40, 9)}

    def scaled(ids: Tensor, factor: int) -> Tensor:
        return ids * factor

    for factor, known in ((9, False), (40, False), (7, True), (2, True)):
        seen = observe(lambda n=factor: [scaled(given["ids"], n), scaled(given["ids"] * n, 3)], frozenset(), given)
        assert [c.recipe is not None for c in seen.calls if c.code.co_name == "scaled"] == [known, known]
    known, both = Provenance(given), (given["x"] * 1, given["x"] * 2)
    for value, kept in ((both, True), ({"a": both[0]}, True), (list(both), False)):
        known._keep(value, Returned(scaled, {}))
        assert (known.of(both[0]) is not None) == kept
        known.known.clear()
    found = given["ids"].max(-1)
    known.operation(Tensor.max, (given["ids"], -1), {}, found)
    assert known.of(found.indices) is not None, "two of them, always"
    assert sorted(whole_numbers({"a": (1, [slice(2, None, 3)], True, 4.5), "b": torch.Size([5])})) == [1, 2, 3, 5]


def test_provenance__what_was_written_to_has_none_any_more() -> None:
    known, y = Provenance(GIVEN), GIVEN["x"] * 2
    known.operation(torch.mul, (GIVEN["x"], 2), {}, y)
    view = y[:1]
    known.operation(Tensor.__getitem__, (y, slice(1)), {}, view)
    assert torch.equal(follow(known.recipe([view]), OTHER, {})[0], OTHER["x"][:1] * 2)
    y.add_(1)
    assert known.of(y) is None
    assert known.of(view) is None
    with pytest.raises(LookupError):
        known.recipe({"a": view})
    with pytest.raises(LookupError):
        known.recipe(torch.nn.Linear(1, 1))
    known.operation(torch.add, (GIVEN["x"], 2), {"out": torch.nn.Linear(1, 1)}, z := GIVEN["x"] + 2)
    assert known.of(z) is None, "and nobody's forward ends"


def test_provenance__tensors_of_inference_mode_have_none() -> None:
    with torch.inference_mode():
        known, y = Provenance(GIVEN), GIVEN["x"] * 2
        known.operation(torch.mul, (GIVEN["x"], 2), {}, y)
        assert known.of(y) is None
        assert known.of(GIVEN["x"]) == Input("x")
