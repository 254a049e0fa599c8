"""What a newcomer tries works, or fails in one clear line."""

import json

import pytest

from tests.newcomer import table
from tests.newcomer.__main__ import ROWS, try_all
from tests.newcomer.row import Row, judge

WORKS = Row("x", "x", ("done",))
REFUSED = Row("x", "x", ("missing",), refused=True)


@pytest.mark.parametrize(
    ("row", "code", "out", "err", "wrong"),
    [
        (WORKS, 0, "all done", "loading torch", ""),
        (WORKS, 0, "all", "", "'done' is not in: all"),
        (WORKS, 1, "done", "error: x", "exit code 1: error: x"),
        (WORKS, 0, "done", "Traceback (most recent call last)", "'Traceback (most recent call last)' is in the output"),
        (REFUSED, 3, "", "loading torch\nerror: missing\n", ""),
        (REFUSED, 0, "", "error: missing", "exit code 0: error: missing"),
        (REFUSED, 3, "", "error: a\nerror: missing", "2 lines of errors: "),
        (Row("x", "x", interrupted=1.0), 130, "", "", ""),
        (Row("x", "x", interrupted=1.0), 0, "", "", "exit code 0, not 130: "),
    ],
)
def test_judge__what_is_wrong(row, code, out, err, wrong):
    found = judge(row, code, out, err)
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)


def test_page__is_what_the_figures_say_and_nothing_in_it_is_wrong():
    found = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    assert table.PAGE.read_text(encoding="utf-8") == table.page(found)
    assert list(found["rows"]) == [row.what for row in ROWS if row.what in found["rows"]]
    assert {row["state"] for row in found["rows"].values()} <= {"works", "refused", "not here"}


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_newcomer__every_row_works_or_fails_in_one_clear_line():
    verdicts = try_all()
    assert not [f"{v.row.what}: {v.text}" for v in verdicts if v.state == "WRONG"]
    assert len(verdicts) > 70
