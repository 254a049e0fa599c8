"""Which sizes of a call are marked, and that the marks are gone after the trace."""

import copy

import torch
from torch import nn

from mmqc.front.handover import Handed
from mmqc.front.sizes import Marked, left_on, sizes_vary

WEAK = "_dynamo_weak_dynamic_indices"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.deltas = torch.zeros(1, 1)  # what a forward left


def inputs(batch: int, length: int, images: int) -> dict[str, torch.Tensor]:
    return {
        "grid": torch.ones(images, 3, dtype=torch.long),
        "ids": torch.ones(batch, length, dtype=torch.long),
        "mask": torch.ones(batch, length),
        "pixels": torch.ones(images, 3, 8),
    }


def marked(given: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: sorted(getattr(t, WEAK, ())) for name, t in given.items()}


def test_mark__sizes_above_one() -> None:
    given = inputs(2, 5, 1)
    handed = Handed([[torch.ones(1, 4), torch.ones(3)]], [0], [[3, torch.ones(2, 1)]])
    Marked().mark(given, handed)
    assert marked(given) == {"grid": [1], "ids": [0, 1], "mask": [0, 1], "pixels": [1, 2]}
    assert [sorted(getattr(t, WEAK)) for t in (*handed.values[0], handed.arguments[0][1])] == [[1], [0], [0]]


def test_left_on__what_a_forward_left() -> None:
    model = Named()
    assert left_on(model) == [(model, "deltas")]


def test_clear__leaves_the_callers_own_marks() -> None:
    given, call = inputs(2, 5, 2), Marked()
    torch._dynamo.maybe_mark_dynamic(given["ids"], 1)
    before = {name: copy.deepcopy(vars(t)) for name, t in given.items()}
    call.mark(given, Handed())
    call.clear()
    assert {name: vars(t) for name, t in given.items()} == before
    assert marked(given)["ids"] == [1]


def test_sizes_vary__marks_nothing() -> None:
    given = inputs(2, 5, 2)
    with sizes_vary(False):
        Marked().mark(given, Handed())
    assert not any(marked(given).values())
