"""Rows that take the places of others are found by counting rows, to the bit, at any number of them."""

from typing import Any

import pytest
import torch
from fusion_cases import linear
from torch import Tensor, nn

from mmqc.compiler.record import collect_records
from mmqc.passes import rewrite_scatter


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite_scatter, "DEVICES", ("cpu",))


class Merge(nn.Module):
    """Images' embeddings among those of words, as transformers puts them there; ``how``: the form of the mask."""

    def __init__(self, how: str = "rows") -> None:
        super().__init__()
        self.embed, self.image, self.how = nn.Embedding(50, 32), linear(32), how

    def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
        x, found = self.embed(ids), self.image(patches)
        mask = (ids == 7).unsqueeze(-1)
        if self.how == "expanded":
            mask = mask.expand_as(x)
        elif self.how == "channels":
            mask = mask & (x > 0)
        elif self.how == "stacked":
            found = found.unflatten(0, (-1, 2))
        return self.image(x.masked_scatter(mask, found.to(x.dtype)))


def ids_of(*rows: list[int]) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(rows)
    places = int((ids == 7).sum())
    return ids, torch.randn(max(2, places + places % 2), 32)


def sites(records: list[Any]) -> list[str]:
    return [site for r in records for p in r.passes if p.name == "rewrite_scatter" for site in p.sites]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("how", ["rows", "expanded", "stacked"])
def test_rewrite_scatter__rows_in_their_order(how: str) -> None:
    model = Merge(how).eval()
    ids, patches = ids_of([7, 1, 7, 7, 2], [3, 7, 4, 5, 6])
    with torch.no_grad(), collect_records() as records:
        expected, got = model(ids, patches), torch.compile(model, backend="mmqc", fullgraph=True)(ids, patches)
    assert torch.equal(got, expected)
    assert len(sites(records)) == 1


@pytest.mark.usefixtures("on_cpu")
def test_rewrite_scatter__any_numbers_of_rows_are_one_program() -> None:
    model = Merge().eval()
    compiled: Any = torch.compile(model, backend="mmqc", fullgraph=True, dynamic=True)
    with torch.no_grad(), collect_records() as records:
        for row in ([1, 7, 7, 2, 3], [7] * 9, [4, 5, 6, 4, 5, 6], [2, 7, 3, 7, 7, 7, 7, 7, 1, 1, 7]):  # none, too
            ids, patches = ids_of(row, row[::-1])
            assert torch.equal(compiled(ids, patches), model(ids, patches))
    assert len(records) == 1
    assert len(sites(records)) == 1


@pytest.mark.usefixtures("on_cpu")
def test_rewrite_scatter__a_row_that_is_not_taken_reaches_nothing() -> None:
    """More rows than places, NaN in those that are left."""
    model = Merge().eval()
    ids, patches = ids_of([7, 1, 2, 7])
    patches = torch.cat([patches[:2], torch.full((3, 32), torch.nan)])
    with torch.no_grad():
        expected, got = model(ids, patches), torch.compile(model, backend="mmqc", fullgraph=True)(ids, patches)
    assert torch.equal(got, expected)
    assert not got.isnan().any()


@pytest.mark.usefixtures("on_cpu")
def test_rewrite_scatter__a_mask_of_channels_stays() -> None:
    model = Merge("channels").eval()
    ids, patches = ids_of([7, 1, 7, 7, 2])
    with torch.no_grad(), collect_records() as records:
        expected, got = model(ids, patches), torch.compile(model, backend="mmqc", fullgraph=True)(ids, patches)
    assert torch.equal(got, expected)
    assert not sites(records)


def test_rewrite_scatter__a_cpu_does_so_already() -> None:
    model = Merge().eval()
    ids, patches = ids_of([7, 1, 7, 7, 2])
    with torch.no_grad(), collect_records() as records:
        torch.compile(model, backend="mmqc", fullgraph=True)(ids, patches)
    assert not sites(records)


class Both(Merge):
    """Videos' embeddings behind images': what the second takes the places in is what the first gave."""

    def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
        x, found = self.embed(ids), self.image(patches)
        for token in (7, 8):
            x = x.masked_scatter((ids == token).unsqueeze(-1).expand_as(x), found)
        return self.image(x)


@pytest.mark.usefixtures("on_cpu")
def test_rewrite_scatter__one_behind_another() -> None:
    model = Both().eval()
    ids, patches = torch.tensor([[7, 1, 8, 7, 2], [3, 8, 8, 7, 6]]), torch.randn(4, 32)
    with torch.no_grad(), collect_records() as records:
        expected, got = model(ids, patches), torch.compile(model, backend="mmqc", fullgraph=True)(ids, patches)
    assert torch.equal(got, expected)
    assert len(sites(records)) == 2
