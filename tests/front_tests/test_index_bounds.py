"""An index out of bounds is an error before the kernel has it; on a GPU, a trial that has one is dropped, and the model runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from mmqc.front.find import Finder
from mmqc.front.index_bounds import IndicesInBounds

rows = torch.arange(20.0).view(5, 4)
WRONG: dict[str, Callable[[Tensor], Any]] = {
    "one axis": lambda i: rows[i],
    "the second axis": lambda i: rows.t()[:, i],
    "behind a mask": lambda i: rows.view(1, 5, 4)[torch.tensor([True]), i],
    "put": lambda i: rows.clone().index_put_((i,), torch.zeros(())),
    "embedding": lambda i: nn.functional.embedding(i, rows),
    "select": lambda i: rows.index_select(0, i),
    "gather": lambda i: rows.gather(0, i[:, None]),
    "scatter": lambda i: rows.scatter(0, i[:, None], 0.0),
    "add": lambda i: rows.index_add(0, i, rows[: len(i)]),
    "reduce": lambda i: rows.scatter_reduce(0, i[:, None], rows[: len(i), :1], "amax"),
}


@pytest.mark.parametrize("way", WRONG)
def test_bounds__wrong_index_is_found_and_right_ones_give_the_same(way: str) -> None:
    right = torch.tensor([4, 0, 2])
    with IndicesInBounds():
        got = WRONG[way](right)
    torch.testing.assert_close(got, WRONG[way](right), rtol=0, atol=0)
    for wrong in (torch.tensor([0, 5, 1]), torch.tensor([1, -6, 1])):
        with IndicesInBounds(), pytest.raises(IndexError, match=r"out of bounds of 5 entries"):
            WRONG[way](wrong)


def test_bounds__empty_and_negative_indices_are_in_bounds() -> None:
    with IndicesInBounds():
        assert rows[torch.tensor([-5, -1])].shape == (2, 4)
        assert rows[torch.empty(0, dtype=torch.long)].shape == (0, 4)


def test_bounds__operators_of_operators_run() -> None:
    q = torch.randn(1, 2, 16, 16)
    with IndicesInBounds():
        got = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))
    assert torch.equal(got, flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j)))


class Positions(nn.Module):
    """Reads sizes out of a tensor, and chooses rows of a table by them: the product of all sizes is not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 16))

    def forward(self, grid: Tensor) -> Tensor:
        """As many rows as pixels."""
        return self.rows(grid)

    def rows(self, grid: Tensor) -> Tensor:
        """Rows 0 ... h - 1 for every w of an image."""
        sizes = [(int(h), int(w)) for h, w, _ in grid]
        return torch.cat([self.table[torch.arange(h, device=self.table.device)].repeat(w, 1) for h, w in sizes])


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.linear = Positions(), nn.Linear(16, 16)

    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        return self.linear(pixels + self.positions(grid))


def tower() -> tuple[Tower, dict[str, Tensor]]:
    grid = torch.tensor([[4, 3, 1], [2, 5, 1]])
    return Tower().eval(), {"pixels": torch.randn(22, 16), "grid": grid}


def test_find__trial_with_a_wrong_index_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tower()
    finder = Finder(0, model, inputs)
    reasons, exact = list[str](), finder.exact
    monkeypatch.setattr(finder, "exact", lambda sites: reasons.append(exact(sites)) or reasons[-1])
    assert [site.form for site in finder.find().sites] == ["list"]  # type: ignore[union-attr]
    assert reasons[0].startswith("IndexError")
    assert not reasons[-1]


@pytest.mark.gpu
@torch.no_grad()
def test_find__device_is_whole_behind_a_wrong_trial() -> None:
    model, inputs = tower()
    expected = model(**inputs)
    model.to("cuda").compile(backend="mmqc")
    got = model(**{k: v.to("cuda") for k, v in inputs.items()})
    assert (got.cpu() - expected).abs().max() < 1e-4
