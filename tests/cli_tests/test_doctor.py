"""The environment check, on stand-ins for what is missing here."""

import tomllib
from pathlib import Path

from commands import invoke

from mmqc.cli import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_doctor__supported_versions_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, (first, beyond) in doctor.SUPPORTED.items():
        wanted = f"{package}>={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}"
        assert wanted in project["dependencies"]


def test_doctor__finds_the_pinned_packages_supported():
    checks = {c.name: c for c in doctor.examine(smoke=False)}
    assert all(checks[name].status == "ok" for name in ("python", *doctor.SUPPORTED))


def test_doctor__a_missing_compiler_is_a_problem(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    checks = doctor.examine(smoke=False)
    assert not doctor.sound(checks)
    assert any("no-such-compiler" in c.found for c in checks)
    assert any("install g++" in line for line in doctor.fallbacks(checks))
    assert invoke("doctor", "--no-smoke").exit_code == 1


def test_doctor__an_unsupported_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: {"torch": "2.10.1"}.get(package, "99"))
    checks = {c.name: c for c in doctor.examine(smoke=False)}
    assert checks["torch"].status == "problem"
    assert "2.11 or newer" in checks["torch"].advice


def test_doctor__a_failing_smoke_test_is_reported_not_raised():
    def broken():
        raise RuntimeError("the compiler fell over\nmore")

    check = doctor._guard("compiled int8", broken)
    assert check.status == "problem"
    assert check.found == "RuntimeError: the compiler fell over"


def test_doctor__debug_shows_the_traceback_of_a_failing_check(monkeypatch):
    def examine(smoke):
        return [doctor._guard("compiled int8", lambda: [][0])]

    monkeypatch.setattr(doctor, "examine", examine)
    quiet, debug = invoke("doctor"), invoke("--debug", "doctor")
    assert quiet.exit_code == debug.exit_code == 1
    assert "IndexError: list index out of range" in quiet.stdout
    assert quiet.stderr == ""
    assert "Traceback" in debug.stderr
    assert "in _guard" in debug.stderr


def test_doctor__compiled_int8_equals_eager():
    check = doctor._guard("compiled int8", doctor._smoke)
    assert check.status == "ok", check.found
