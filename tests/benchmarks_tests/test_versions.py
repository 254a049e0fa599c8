"""The table of versions: its page is what its figures say, its bounds are the package's, a report is counted right."""

import tomllib
from pathlib import Path

import pytest

from benchmarks.surveys import versions
from mmqc.cli.doctor import SUPPORTED
from mmqc.versions import numbers

ROOT = Path(__file__).resolve().parents[2]


def test_page__is_what_the_figures_say():
    assert versions.PAGE.read_text(encoding="utf-8") == versions.page(versions.read())


def test_bounds__are_those_of_the_package_and_of_doctor():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, (first, beyond) in SUPPORTED.items():
        bound = next(d.removeprefix(package) for d in project["dependencies"] if d.startswith((f"{package}>", f"{package}=")))
        assert bound == f">={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}"


@pytest.mark.parametrize("package", SUPPORTED)
def test_bounds__are_the_first_and_the_last_version_that_was_tried(package):
    tried = sorted({numbers(row[package])[:2] for row in versions.read() if package in row})
    first, beyond = SUPPORTED[package]
    assert tried[0] == first
    assert (tried[-1][0], tried[-1][1] + 1) == beyond


def test_counted__of_a_report(tmp_path):
    report = tmp_path / "r.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c"><failure/></testcase>'
        '<testcase classname="a" name="d"><error/></testcase><testcase classname="a" name="e"><skipped message="why"/></testcase>'
        "</testsuite></testsuites>"
    )
    want = {"passed": 1, "failed": 2, "skipped": 1, "failures": ["a::c", "a::d"], "reasons": {"why": 1}}
    assert versions.counted(report) == want


def test_add__takes_the_place_of_the_row_of_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "PAGE", tmp_path / "versions.md")
    one = {"name": "a", "failed_to_build": "no such version"}
    for row in (one, {**one, "name": "b"}, {**one, "failed_to_build": "no room"}):
        versions.add(row)
    assert [(row["name"], row["failed_to_build"]) for row in versions.read()] == [("a", "no room"), ("b", "no such version")]
    assert "| a | | | | | not built: no room |" in versions.PAGE.read_text()


def test_merged__what_had_failed_and_passes_now():
    row = {"name": "a", "passed": 2, "failed": 2, "skipped": 0, "failures": ["a::c", "a::d"], "commit": "old", "tests": "border"}
    new = {"passed": 1, "failed": 1, "failures": ["a::d"], "commit": "new", "date": "today"}
    found = versions.merged(row, new)
    assert (found["passed"], found["failed"], found["failures"], found["commit"]) == (3, 1, ["a::d"], "old")
    packages = dict.fromkeys(("python", "torch", "transformers", "torchao"), "1")
    assert "| border | 3 | 1 | 0 | old, 1 of them new |" in versions.page([found | packages | {"reasons": {}}])
