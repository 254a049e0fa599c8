"""Criteria in one operation say what transformers' criteria say, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)  # fmt: skip

from mmqc.compiler.step_stops import plain_stops


@given(
    ends=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=2),
    most=st.one_of(st.none(), st.integers(1, 6)),
    positions=st.one_of(st.none(), st.integers(1, 6)),
    ids=st.integers(1, 3).flatmap(
        lambda b: st.integers(1, 5).flatmap(
            lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=b, max_size=b)
        )
    ),
)
def test_step_stops__say_the_same(ends: list[list[int]], most: int | None, positions: int | None, ids: list[list[int]]) -> None:
    theirs = StoppingCriteriaList(map(EosTokenCriteria, ends))
    if most is not None:
        theirs.insert(0, MaxLengthCriteria(most, positions))
    tokens = torch.tensor(ids)
    ours = plain_stops(theirs, len(ids))
    expected = theirs(tokens, None)
    got = ours(tokens, None)
    assert torch.equal(got, expected)
    assert got.dtype == torch.bool
    assert ours.max_length == theirs.max_length
    # One sequence is not padded behind its end, so that ``generate`` need not know that there is one.
    assert any(hasattr(c, "eos_token_id") for c in ours) == (bool(ends) and len(ids) > 1)


def test_step_stops__several_new_tokens_are_transformers_own() -> None:
    theirs = StoppingCriteriaList([MaxLengthCriteria(9), EosTokenCriteria(2)])
    ids = torch.tensor([[2, 3], [3, 3]])
    assert plain_stops(theirs, 2)(ids, None, new_token_length=2).tolist() == [True, False]


@pytest.mark.parametrize("other", [MaxTimeCriteria(60.0), lambda ids, scores: ids[:, -1] == 3])
def test_step_stops__of_another_kind_are_left_alone(other: Any) -> None:
    theirs = StoppingCriteriaList([MaxLengthCriteria(9), other])
    assert plain_stops(theirs, 1) is theirs
