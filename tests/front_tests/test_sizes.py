"""Which sizes of a call are marked, and that the marks are gone after the trace."""

import copy

import torch
from torch import nn

from mmqc.front.handover import Handed
from mmqc.front.sizes import Marked, constant_sizes, tokens_shape

WEAK = "_dynamo_weak_dynamic_indices"


class Named(nn.Module):
    main_input_name = "ids"

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


def test_mark__sizes_of_images_and_more_than_one_prompt() -> None:
    model, given = Named(), inputs(2, 5, 1)
    handed = Handed([[torch.ones(1, 4), torch.ones(1)]], [0], [[3, torch.ones(2, 1)]])
    Marked().mark(model, given, handed)
    assert marked(given) == {"grid": [0, 1], "ids": [0, 1], "mask": [0, 1], "pixels": [0, 1, 2]}
    assert [sorted(getattr(t, WEAK)) for t in (*handed.values[0], handed.arguments[0][1], model.deltas)] == [[1], [0], [0], [0]]
    assert not hasattr(model.linear.weight, WEAK)


def test_mark__one_prompt_and_one_token_are_constants() -> None:
    given = inputs(1, 1, 1)
    Marked().mark(Named(), given, None)
    assert marked(given) == {"grid": [0, 1], "ids": [], "mask": [], "pixels": [0, 1, 2]}


def test_clear__leaves_the_callers_own_marks() -> None:
    given, call = inputs(2, 5, 2), Marked()
    torch._dynamo.maybe_mark_dynamic(given["ids"], 1)
    before = {name: copy.deepcopy(vars(t)) for name, t in given.items()}
    call.mark(Named(), given, None)
    call.clear()
    assert {name: vars(t) for name, t in given.items()} == before
    assert marked(given)["ids"] == [1]


def test_constant_sizes__marks_nothing() -> None:
    given = inputs(2, 5, 2)
    with constant_sizes():
        Marked().mark(Named(), given, None)
    assert not any(marked(given).values())


def test_tokens_shape__is_of_the_main_input_or_the_first_integers() -> None:
    given = inputs(2, 5, 7)
    assert tokens_shape(Named(), given) == (2, 5)
    assert tokens_shape(nn.Linear(1, 1), given) == (7, 3)
    assert tokens_shape(nn.Linear(1, 1), {"x": torch.ones(2, 2)}) == ()
