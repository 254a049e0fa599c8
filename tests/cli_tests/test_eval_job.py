"""Figures of one model against others, on a stand-in of a sample."""

import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from mmqc.cli import eval_job, evaluation
from mmqc.samples.pairs import Pair
from mmqc.samples.scoring import Score


@pytest.fixture
def load():
    """Models that are their accuracy on a question of each of two kinds."""

    def scores(model, n):
        return [Score("cell", "?", "7", model, 1.0), Score("row", "?", "8", model, 2.0)]

    def pairs(first, second, n, known, cached):
        return [Pair(s.kind, (first, second), (s.nll, s.nll), 0.25 * (1 + i), 0.5) for i, s in enumerate(known[1])]

    sample = SimpleNamespace(name="digits", processor=None, scores=scores, pairs=pairs, calibration=lambda n: [])
    return lambda name: (float(name), sample)


def run(load, model, *against):
    console = Console(record=True, width=200)
    result = eval_job.evaluate(eval_job.Evaluation(model, against, None, (), 2, 8), load, console)
    return result, console.export_text()


def test_evaluate__two_models_that_are_never_right(load):
    result, text = run(load, "0", "0")
    assert math.isnan(result.to_dict()["eval"]["recovery"])
    assert math.isnan(result.recovery)
    assert re.search(r"recovery\W+undefined", text)
    assert evaluation.NEVER_RIGHT in text
    assert "finite" not in text
    assert "nan" not in text.lower()


def test_evaluate__several_others_in_one_table(load):
    result, text = run(load, "1", "1", "0")
    figures = result.to_dict()
    assert figures["eval"]["accuracy"] == 1
    assert "KL" not in figures["eval"]  # of which of the two?
    one, none = (figures["against"][name] for name in ("1", "0"))
    assert (one["accuracy difference"], none["accuracy difference"]) == (0, 1)
    assert (one["flips won"], none["flips won"], none["flips p"]) == (0, 2, 0.5)
    assert one["KL"] == 0.375
    assert none["by kind"]["row"]["KL"] == 0.5
    assert math.isnan(result.recovery)
    assert re.search(r"against 1 .*against 0 ", text)
    assert re.search(r"flips .*-0 \+0, p 1 .*-0 \+2, p 0.5", text)
    assert text.count("by kind of question") == 2
