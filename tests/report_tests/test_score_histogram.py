"""What a layer's histogram of scores says of the kinds that it has, and of one that it has not."""

import dataclasses
import json

from mmqc.report.score_histogram import CALIBRATED, EXACT, ROUNDED, ScoreHistogram


def test_outside__the_share_beyond_the_exact_scores() -> None:
    counts = {EXACT: [0, 2, 0, 2, 0], ROUNDED: [1, 1, 1, 0, 1]}
    assert ScoreHistogram(0, 1, -1.0, 1.0, counts).outside(ROUNDED) == 0.5


def test_kinds__without_tau_calibrated_is_rounded() -> None:
    counts = {EXACT: [0, 2, 0, 2, 0], ROUNDED: [1, 1, 1, 0, 1]}
    plain = ScoreHistogram(0, 1, -1.0, 1.0, counts, {ROUNDED: 0.25})
    assert plain.error_of(CALIBRATED) == plain.error_of(ROUNDED) == 0.25
    assert plain.outside(CALIBRATED) == plain.outside(ROUNDED)
    both = dataclasses.replace(plain, counts={**counts, CALIBRATED: [0, 4, 0, 0, 0]}, error={ROUNDED: 0.25, CALIBRATED: 0.125})
    assert both.error_of(CALIBRATED) == 0.125
    assert both.outside(CALIBRATED) == 0.0


def test_from_dict__survives_json() -> None:
    layer = ScoreHistogram(3, 2, -1.5, 2.0, {EXACT: [1, 2], ROUNDED: [3, 0]}, {ROUNDED: 0.5}, (1.0, 2.0))
    assert ScoreHistogram.from_dict(json.loads(json.dumps(dataclasses.asdict(layer)))) == layer
