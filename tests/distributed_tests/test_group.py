"""Messages between real processes, and what becomes of the others when one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from many_ranks import ended, started

from mmqc.distributed.group import together
from mmqc.distributed.ranks import ALONE

SCRIPT = str(Path(__file__).parents[1] / "support" / "group_messages.py")


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    done = ended(started(2, ["values"], SCRIPT))
    assert [code for code, _, _ in done] == [0, 0], done
    return [json.loads(out) for _, out, _ in done]


def test_together__is_alone_without_a_process_group():
    with together() as ranks:
        assert ranks is ALONE


def test_mine__parts_are_neighbours_and_collected_has_them_in_order(two):
    assert [found["mine"] for found in two] == [[0, 1, 2], [3, 4, 5, 6]]
    assert all(found["collected"] == [f"item {i}" for i in range(7)] for found in two)


def test_shared__tensors_of_every_kind_arrive(two):
    x = torch.arange(6.0).view(2, 3).T
    wanted = {
        "x": [x.tolist(), "torch.float32", [3, 2]],
        "codes": [[1.0, 1.0], "torch.float8_e4m3fn", [2]],
        "none": [[], "torch.float32", [0, 3]],
        "n": 3,
    }
    assert all(found["shared"] == wanted for found in two)


def test_summed__over_those_that_have_a_tensor(two):
    assert all(found["summed"] == {"a": [[10.0, 10.0]] * 2, "count": [3]} for found in two)
    assert all(found["largest"] == {"a": [[10.0, 10.0]] * 2, "count": [2]} for found in two)


def test_summed__for_owners_only(two):
    assert [found["owned"] for found in two] == [{"a": [[10.0, 10.0]] * 2}, {"count": [3]}]


def test_owners__have_about_the_same_to_do(two):
    assert all(found["owners"] == [0, 1, 1, 0] for found in two)


def test_together__an_error_ends_the_others_with_its_words():
    (_, other, _), (_, own, _) = ended(started(2, ["raise"], SCRIPT))
    seconds, words = other.strip().split("|")
    assert own.strip() == "mine"
    assert words == "rank 1 failed: ValueError: this rank has had enough; the model is as it was"
    assert float(seconds) < 60


def test_together__a_killed_rank_ends_the_others():
    (_, other, _), (code, _, _) = ended(started(2, ["kill"], SCRIPT))
    seconds, words = other.strip().split("|")
    assert code == -9
    assert words == "another rank has ended: was it killed?; the model is as it was"
    assert float(seconds) < 60


@pytest.mark.slow
def test_together__does_not_wait_for_ever_for_a_rank_that_does_not_call():
    (_, other, _), _ = ended(started(2, ["absent"], SCRIPT))
    seconds, words = other.strip().split("|")
    assert words == "not all 2 ranks came within 0.05 minutes: each has to make the same call; the model is as it was"
    assert float(seconds) < 20
