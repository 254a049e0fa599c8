"""Statistics of two models on the same questions, against what a pencil says."""

import math

import pytest
import torch

from mmqc.samples.pairs import Flips, Pair, by_kind, compared, divergence, flat


def test_divergence__is_that_of_the_formula():
    first = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    second = torch.tensor([[0.25, 0.75], [0.2, 0.8]]).log()
    want = [0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)]
    kl, agreement = divergence(first, second)
    assert kl == pytest.approx(sum(want) / 2, rel=1e-6)
    assert agreement == 0.0  # a tie goes to the first
    assert divergence(first, first) == (0.0, 1.0)
    never = torch.tensor([[1.0, 0.0]]).log()
    assert divergence(never, never) == (0.0, 1.0)  # 0 log 0 is 0
    assert divergence(first[:1], never)[0] == math.inf


def test_flips__exact_test_of_mcnemar():
    assert Flips(0, 0).p == 1
    assert Flips(5, 5).p == 1
    assert Flips(7, 2).p == pytest.approx(2 * (1 + 9 + 36) / 2**9)
    assert str(Flips(7, 2)) == "-7 +2, p 0.18"


def test_compared__kinds_weigh_alike_or_questions_do():
    pairs = [Pair("a", (1, 0), (0, 1), 0.4, 0.5)] + [Pair("b", (0.5, 1), (0, 0), 0.1, 1.0)] * 3
    alike, each = compared(pairs), compared(pairs, alike=False)
    assert alike["KL"].mean == pytest.approx(0.25)
    assert each["KL"].mean == pytest.approx(0.175)
    assert alike["accuracy difference"].mean == pytest.approx((-1 + 0.5) / 2)
    assert alike["flips"] == Flips(lost=1, won=3)
    assert each["KL"].low < each["KL"].mean < each["KL"].high
    assert list(by_kind(pairs)) == ["a", "b"]
    numbers = flat(by_kind(pairs)["b"])
    assert (numbers["KL"], numbers["KL low"], numbers["flips won"], numbers["flips p"]) == (
        pytest.approx(0.1),
        pytest.approx(0.1),
        3,
        0.25,
    )
