"""Processors in one operation give the scores that transformers' give, one by one, and nothing else changes hands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation import logits_process as theirs
from transformers.generation.logits_process import LogitsProcessorList, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

from mmqc.compiler.step_scores import plain_scores

WORDS = 7
ENDS = st.lists(st.integers(-1, WORDS + 1), min_size=1, max_size=3)  # some that the vocabulary has not


@given(
    ends=ENDS,
    least=st.integers(0, 6),
    new=st.integers(0, 6),
    skipped=st.integers(0, 4),
    warmer=st.booleans(),
    length=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_step_scores__are_the_same(
    ends: list[int], least: int, new: int, skipped: int, warmer: bool, length: int, seed: int
) -> None:
    given = LogitsProcessorList([MinLengthLogitsProcessor(least, ends), MinNewTokensLengthLogitsProcessor(skipped, new, ends)])
    if warmer:
        given.append(theirs.TemperatureLogitsWarper(0.7))
    ids, scores = torch.randint(WORDS, (2, length)), torch.randn(2, WORDS, generator=torch.Generator().manual_seed(seed))
    expected = given(ids, scores.clone())
    got = plain_scores(given, GenerationConfig())(ids, scores)
    assert torch.equal(got, expected)


def test_step_scores__are_not_copied() -> None:
    ours = plain_scores(LogitsProcessorList([MinNewTokensLengthLogitsProcessor(1, 2, 3)]), GenerationConfig())
    scores = torch.randn(2, WORDS)
    assert ours(torch.zeros(2, 1, dtype=torch.long), scores) is scores
    assert scores[:, 3].isneginf().all()
    assert scores.isneginf().sum() == 2
    whole = scores.clone()
    assert torch.equal(ours(torch.zeros(2, 3, dtype=torch.long), scores), whole)


def test_step_scores__of_logits_that_are_collected_are_left_alone() -> None:
    given = LogitsProcessorList([MinLengthLogitsProcessor(4, 3)])
    assert plain_scores(given, GenerationConfig(return_dict_in_generate=True, output_logits=True)) is given
    assert plain_scores(given, GenerationConfig(return_dict_in_generate=True, output_scores=True)) is not given


@pytest.mark.parametrize("other", [theirs.InfNanRemoveLogitsProcessor(), lambda ids, scores: scores])
def test_step_scores__of_another_kind_are_left_alone(other: Any) -> None:
    given = LogitsProcessorList([MinLengthLogitsProcessor(4, 3), other])
    assert plain_scores(given, GenerationConfig()) is given
