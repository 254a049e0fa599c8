"""An index or a mask that is computed chooses other rows for another input: what was recorded holds for those too."""

from collections.abc import Callable

import pytest
import torch
from blocks import VOCAB, WIDTH, Mlp, RMSNorm
from float64 import EXACT, output_of, relative_error
from models import randomise
from torch import Tensor, nn

import mmqc
from mmqc.graph.spaces.selections import chosen_axes

IDS = torch.tensor([[3, 1, 4, 1, 5, 2]])
Middle = Callable[[Tensor, Tensor, Tensor], Tensor]


class Stream(nn.Module):
    """A residual stream into which ``middle`` puts rows of a branch's, by an index or a mask that the caller gives."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.middle = middle
        self.embed, self.first, self.second = nn.Embedding(VOCAB, WIDTH), Mlp(), Mlp()
        self.norms, self.head = nn.ModuleList(RMSNorm() for _ in range(3)), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, at: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.middle(x, self.first(self.norms[0](x)), at)
        x = x + self.second(self.norms[1](x))
        return self.head(self.norms[2](x))


def behind(x: Tensor, out: Tensor) -> Tensor:
    """``out`` is added to all rows but the first, which nothing looks at."""
    return torch.cat((x[:, :1], x[:, 1:] + out[:, 1:]), 1)


def assigned(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, at] = y[:, at]
    return behind(x, out)


def put(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    out = torch.zeros_like(x[0])
    out[at] = out[at] + y[0, at]
    return behind(x, out[None])


def mask(at: Tensor, x: Tensor) -> Tensor:
    """[B, L, 1]: all rows behind the one that ``at`` names; none if it names the last."""
    return (torch.arange(x.shape[1]) > at[0])[None, :, None]


def index(at: Tensor, x: Tensor) -> Tensor:
    """[B, 3, D]: three rows, beginning with the one that ``at`` names."""
    return (at[0] + torch.arange(3))[None, :, None].expand(1, -1, x.shape[-1])


ROWS: dict[str, Middle] = {
    "index_add": lambda x, y, at: behind(x, torch.zeros_like(x).index_add(1, at, y[:, at])),
    "index_add_": lambda x, y, at: behind(x, torch.zeros_like(x[0]).index_add_(0, at, y[0, at])[None]),
    "index_copy": lambda x, y, at: behind(x, torch.zeros_like(x).index_copy(1, at, y[:, at])),
    "assigned": assigned,
    "put": put,
    "scattered": lambda x, y, at: behind(x, torch.zeros_like(x).scatter(1, index(at, x) % 2, y[:, :3])),
}
LAST = torch.tensor([5])
MASKS: dict[str, Middle] = {
    "where": lambda x, y, at: torch.where(mask(at, x), y, x),
    "where_constant": lambda x, y, at: torch.where(mask(at, x), torch.ones_like(x), x + y),
    "masked_fill": lambda x, y, at: (x + y).masked_fill(mask(at, x), 1.0),
    "masked_fill_": lambda x, y, at: (x + y).masked_fill_(mask(at, x), 1.0),
    "masked_scatter": lambda x, y, at: x.masked_scatter(mask(at, x).expand_as(x), y),
    "masked_assignment": lambda x, y, at: x.clone().index_put((mask(at, x)[..., 0],), y[mask(at, x)[..., 0]]),
}
CHOICES: dict[str, Middle] = {
    "getitem": lambda x, y, at: torch.cat((y, x), 1)[:, at[0] + torch.arange(3)],
    "index_select": lambda x, y, at: torch.cat((y, x), 1).index_select(1, at[0] + torch.arange(3)),
    "gather": lambda x, y, at: torch.cat((y, x), 1).gather(1, index(at, x)),
    "take_along_dim": lambda x, y, at: torch.take_along_dim(torch.cat((y, x), 1), index(at, x)[..., :1], 1),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("middle", "seen", "other"),
    [
        *(pytest.param(middle, torch.tensor([0]), torch.tensor([2]), id=name) for name, middle in ROWS.items()),
        *(pytest.param(middle, LAST, torch.tensor([2]), id=name) for name, middle in MASKS.items()),
        *(pytest.param(middle, torch.tensor([7]), torch.tensor([1]), id=name) for name, middle in CHOICES.items()),
    ],
)
def test_selections__other_rows_than_those_recorded(middle: Middle, seen: Tensor, other: Tensor) -> None:
    model = randomise(Stream(middle)).double()
    calls = [{"input_ids": IDS, "at": at} for at in (seen, other)]
    expected = [output_of(model, call) for call in calls]
    mmqc.quantize_(model, mmqc.recipes.rotate(), calls[:1], progress=False)
    assert [relative_error(output_of(model, call), e) < EXACT for call, e in zip(calls, expected, strict=True)] == [True, True]


@pytest.mark.parametrize("name", ["index_add", "assigned", "where", "masked_scatter", "getitem"])
def test_selections__what_is_alike_for_every_choice_is_rotated(name: str) -> None:
    model = randomise(Stream({**ROWS, **MASKS, **CHOICES}[name])).double()
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), [{"input_ids": IDS, "at": torch.tensor([2])}], progress=False)
    (sites,) = (record.sites for record in report.passes if record.name == "fuse_rotation")
    assert any(f"space of {WIDTH}" in site and "3 writers" in site for site in sites), sites


def test_selections__axes_of_an_index() -> None:
    at, flags = torch.tensor([0, 2]), torch.ones(3, 4, dtype=torch.bool)
    node = torch.fx.Graph().placeholder("at")
    everything = slice(None)
    assert chosen_axes((everything, node), (everything, at), 3) == [1]
    assert chosen_axes(node, at, 2) == [0]
    assert chosen_axes((node, node, None), (at, at, None), 4) == [0, 1]
    assert chosen_axes((..., node, everything), (..., at, everything), 4) == [2]
    assert chosen_axes(node, flags, 3) == [0, 1]
    assert chosen_axes(node, flags, 2) == [0]  # whole rows
    assert chosen_axes(node, flags.tril(), 2) == []
    assert chosen_axes((everything, node), (everything, at), 2) == []  # channels
    assert chosen_axes((everything, [0, 2]), (everything, [0, 2]), 3) == []
