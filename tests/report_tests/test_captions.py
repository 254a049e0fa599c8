"""Captions say what the plotted values say, whichever way they go."""

import pytest

from mmqc.report import captions
from mmqc.report.score_histogram import ScoreHistogram


def layer(name, visual=None, text=None, sqnr=None):
    ranges = {m: (-reach, reach) for m, reach in (("visual", visual), ("text", text)) if reach is not None}
    return {"fqn": f"layers.{name}", "tower": "language", "ranges": ranges, "sqnr": sqnr or {}}


def ranges(*layers):
    return captions.ranges_caption({"m": {"layers": layers}}, ("language",))


def test_ranges__say_which_way_and_whether_it_matters():
    wide = ranges(layer("0.q", 30.0, 1.0), layer("1.q", 6.0, 5.0), layer("2.q", 1.0, 4.0))
    assert wide == [
        "Visual inputs reach 1.2 times as far as text inputs (median), at most 30.0 times, in 0 q; in 2 of 3 inputs one reaches "
        "more than twice as far as the other: one static scale for both would leave the smaller one less than half of the codes."
    ]
    (alike,) = ranges(layer("0.q", 1.0, 1.25))
    assert "0.8 times" in alike
    assert "in 0 q; nowhere do the two differ by more than a factor of two, so that one scale would serve both." in alike
    assert ranges(layer("0.q", 1.0)) == ["Visual tokens reach these layers."]
    assert ranges() == []


def test_noise__names_the_layer_that_loses_most():
    layers = [layer("0.q", sqnr={"visual": 31.0}), layer("1.q", sqnr={"visual": 12.0})]
    reports = {"a": {"layers": layers}, "b": {"layers": [layer("0.q", sqnr={"text": 9.0})]}}
    assert captions.noise_caption(reports) == [
        "a: median 21.5 dB on visual rows; lowest 12.0 dB, on visual rows of layers.1.q.",
        "b: median 9.0 dB on text rows; lowest 9.0 dB, on text rows of layers.0.q.",
    ]


def test_spread__says_where_weights_became_worse():
    pairs = {"a": (9.0, 5.0), "b": (9.4, 31.8), "c": (4.0, 4.0), "d": (float("nan"), 1.0)}
    (said,) = captions.spread_caption({"m": {"incoherence": pairs}})
    assert said == "Median 9.0 → 5.0; lower after the rewrites in 1 of 3 weights, higher in 1, most of all in b (9.4 → 31.8)."
    (better,) = captions.spread_caption({"m": {"incoherence": {"a": (9.0, 5.0)}}})
    assert better == "Median 9.0 → 5.0; lower after the rewrites in 1 of 1 weight."


def test_steps__the_ends_and_the_largest():
    steps = [{"step": "float", "recovery": 1.0}, {"step": "static", "recovery": 0.61}, {"step": "+ MSQ", "recovery": 0.92}]
    said = captions.steps_caption([*steps, {"step": "+ RMS", "recovery": 0.99}])
    assert said == "61.0 % of the float model's accuracy at first, 99.0 % with all of them; most of it by “MSQ” (+31.0 points)"
    assert captions.steps_caption(steps[:2]) == ""


@pytest.mark.parametrize("calibrated", [False, True])
def test_scores__medians_of_what_was_measured(calibrated):
    counts = {"exact": [0, 5, 5, 0], "rounded": [1, 4, 4, 1]} | ({"calibrated": [0, 5, 5, 0]} if calibrated else {})
    error = {"rounded": 1e-3} | ({"calibrated": 2e-4} if calibrated else {})
    said = captions.scores_caption([ScoreHistogram(0, 1, -1.0, 1.0, counts, error)])
    assert said.startswith("rounded, 20.0% are beyond the exact scores and the mean squared error of the softmax is 1.0e-03")
    assert ("calibrated, 0.0% are" in said) == calibrated
    assert said.endswith("(medians of 1 layer)")


def test_columns__only_those_that_are_there():
    meanings = {"nll": "nll is x", "size": "size is y"}
    assert captions.columns_caption([{"nll": 1}, {"nll/row": 2}], meanings) == "nll is x"
