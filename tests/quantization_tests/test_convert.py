"""Edits of a model come undone, and do not keep what nobody needs any more."""

import gc
import weakref
from contextlib import suppress

import torch
from torch import nn

from mmqc.quantization.convert import Journal


def edited(journal: Journal) -> weakref.ref[nn.Parameter]:
    """Replace a weight twice; the first replacement."""
    journal.parameter("0.weight", torch.ones(2, 3))
    first = weakref.ref(journal.model.get_parameter("0.weight"))
    journal.parameter("0.weight", torch.full((2, 3), 2.0))
    return first


def test_journal__a_weight_that_was_replaced_twice_is_in_memory_once_and_comes_back() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    weight, before = model[0].weight, model[0].weight.detach().clone()
    with suppress(RuntimeError), Journal(model) as journal:
        first = edited(journal)
        gc.collect()
        assert first() is None
        assert torch.equal(model[0].weight, torch.full((2, 3), 2.0))
        raise RuntimeError("undo")
    assert model[0].weight is weight
    assert torch.equal(model[0].weight, before)


def test_journal__what_stays_is_the_last_edit() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with Journal(model) as journal:
        edited(journal)
        journal.parameter("0.scale", torch.ones(1))
        journal.parameter("0.scale", torch.zeros(1))
    assert torch.equal(model[0].weight, torch.full((2, 3), 2.0))
    assert model[0].scale.item() == 0


def test_journal__undoing_removes_what_was_not_there() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with suppress(RuntimeError), Journal(model) as journal:
        journal.parameter("0.scale", torch.ones(1))
        journal.parameter("0.scale", torch.zeros(1))
        raise RuntimeError("undo")
    assert getattr(model[0], "scale", None) is None


def test_journal__takes_back_edits_of_other_kinds_in_their_turn() -> None:
    model, seen = nn.Sequential(nn.Linear(3, 2)), []
    with suppress(RuntimeError), Journal(model) as journal:
        journal.attribute(model[0], "in_features", 4)
        journal.note(lambda: seen.append(model[0].in_features))
        journal.attribute(model[0], "in_features", 5)
        raise RuntimeError("undo")
    assert seen == [4]
    assert model[0].in_features == 3


def test_journal__takes_nothing_back_where_nothing_failed() -> None:
    seen: list[int] = []
    with Journal(nn.Sequential()) as journal:
        journal.note(lambda: seen.append(1))
    assert seen == []
