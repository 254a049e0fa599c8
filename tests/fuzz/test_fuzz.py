"""Random programs against the float model: saved failures stay mended, new programs show none, planted errors are found."""

from __future__ import annotations

import itertools
import os
import time

import pytest

from tests.fuzz.build import text
from tests.fuzz.campaign import campaign, known_cases, outcome_of
from tests.fuzz.check import GOOD
from tests.fuzz.draw import draw
from tests.fuzz.planted import PLANTED, hunt
from tests.fuzz.pool import pool
from tests.fuzz.shrink import candidates, shrink

SECONDS, PROGRAMS = 60.0, 25  # whichever comes first: a fast machine sees no others than a slow one
KNOWN = known_cases()


@pytest.mark.parametrize("name", KNOWN)
def test_saved__is_equal_or_refused(name):
    saved = KNOWN[name]
    outcome = outcome_of(saved["case"])
    assert outcome.kind in GOOD, f"{outcome}\n{text(saved['case']['program'])}"


def test_new__programs_are_equal_or_refused(request):
    """The seed is the run's: ``--seed=fresh`` draws others."""
    seed = int(request.config.getoption("seed"))
    state, found = campaign(seed, SECONDS, programs=PROGRAMS)
    assert not [each.detail for each in found], "saved in tests/fuzz/cases"
    assert state.counts["programs"] > 20
    assert state.counts["invalid"] < 0.05 * state.counts["programs"]
    assert state.counts["changed by mmqc"] > 0.5 * state.counts["programs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted__is_found(name):
    """Few programs use a weight twice beside a rotated stream, or read what was computed before a write of other channels."""
    case, _ = hunt(name, {"unread weights": 240.0, "shared memory": 480.0}.get(name, 60.0))
    assert case is not None


def perilous(seeds, known, options):
    """Work that dies of one seed, hangs at another, and gives back the rest."""
    for seed in seeds:
        options["shared"].at(seed)
        if seed == 3:
            os._exit(7)
        if seed == 5:
            time.sleep(1000)
    return seeds


@pytest.mark.slow
def test_pool__reports_what_a_process_dies_of_or_hangs_at(monkeypatch):
    monkeypatch.setattr("tests.fuzz.pool.LIMIT", 5)
    monkeypatch.setattr("tests.fuzz.pool.GRACE", 0)
    monkeypatch.setattr("tests.fuzz.pool.DRAIN", 60)
    monkeypatch.setattr("tests.fuzz.pool.STARTING", 40)
    rows = itertools.chain([[0, 1], [2, 3], [4, 5], [6, 7]], ([n] for n in itertools.count(8)))
    wanted, found = [[2], [4], (3, "died with exit code 7"), (5, "hang")], []
    for done, lost in pool(perilous, 2, 40.0, lambda: next(rows), [], {}, 0):
        found.append(lost or done)
        if all(each in found for each in wanted):
            break
    assert all(each in found for each in wanted), found[:20]


def test_draw__is_the_same_for_a_seed():
    assert draw(7) == draw(7) != draw(8)


def test_shrink__keeps_what_fails_and_drops_the_rest():
    case = next(c for c in map(draw, range(100)) if any(step["op"] == "slice" for step in c["program"]["steps"]))
    fails = lambda c: any(step["op"] == "slice" for step in c["program"]["steps"])  # noqa: E731
    small = shrink(case, fails)
    assert [step["op"] for step in small["program"]["steps"]] == ["slice"]
    assert len(small["calls"]) == len(small["calibration"]) == 1
    assert not any(fails(smaller) for smaller in candidates(small))
