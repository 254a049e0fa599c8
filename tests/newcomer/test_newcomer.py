"""What a newcomer tries works, or fails in one clear line."""

import json
import signal

import pytest

from tests.newcomer import table
from tests.newcomer.__main__ import ROWS, try_all
from tests.newcomer.row import Row, chosen, judge, last_line, run

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
        (Row("x", "x", interrupted=signal.SIGINT), 130, "", "", ""),
        (Row("x", "x", interrupted=signal.SIGINT), 0, "", "", "exit code 0, not 130: "),
    ],
)
def test_judge__what_is_wrong(row, code, out, err, wrong):
    found = judge(row, code, out, err)
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)


def test_last_line__is_no_frame_of_a_table():
    assert last_line("first\n┌───┐\n│ a 1 │\n└───┘\n\n") == "a 1"
    assert last_line("└───┘") == ""


def test_chosen__are_the_rows_that_make_what_a_row_reads_too():
    assert [row.what for row in chosen(ROWS, ["SFTTrainer"])] == ["own model, own data: mquant", "SFTTrainer and LoRA"]
    assert [row.what for row in chosen(ROWS, ["resumed"])] == ["own model, own data: gptq", "killed", "resumed"]
    assert chosen(ROWS, []) == list(ROWS)


def test_run__hides_a_package_that_is_installed(tmp_path):
    assert run(Row("x", "import rich", code=True), tmp_path).state == "works"
    hidden = Row("x", "import rich", ("import of rich halted",), code=True, refused=True, without=("rich",))
    assert run(hidden, tmp_path).state == "refused"
    shell = Row("x", "--help", code=False, refused=True, without=("typer",))
    assert "import of typer halted" in run(shell, tmp_path).text


def test_run__interrupts_at_the_words(tmp_path):
    line = "import sys, time; print('half', file=sys.stderr, flush=True); time.sleep(60); open('made', 'w')"
    assert run(Row("x", line, code=True, interrupted=signal.SIGKILL, at="half"), tmp_path).state == "works"
    assert not (tmp_path / "made").exists()


def test_page__is_what_the_figures_say_of_one_run_and_every_row_works_or_is_refused():
    found = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    assert table.PAGE.read_text(encoding="utf-8") == table.page(found)
    assert list(found["rows"]) == [row.what for row in ROWS]
    assert [row["state"] for row in found["rows"].values()] == ["refused" if row.refused else "works" for row in ROWS]


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_newcomer__every_row_works_or_fails_in_one_clear_line():
    verdicts = try_all()
    assert not [f"{v.row.what}: {v.text}" for v in verdicts if v.state == "WRONG"]
    assert len(verdicts) > 70
