"""The plugin of ``make gpu``: its halves, and its last line, in a run of small tests without a GPU."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from gpu_run import halves

SUPPORT = Path(__file__).parent / "support"
TESTS = """
import os, signal
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(4))
def test_right(i):
    assert i < 4

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(3))
def test_wrong(i, record_property):
    record_property("sanitizer", (1, 3))
    assert i < 2

@pytest.mark.gpu
def test_skipped():
    pytest.skip("why")

@pytest.mark.gpu
def test_stopped():
    if "STOP" in os.environ:
        os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGTERM)
        signal.pause()

def test_on_the_cpu():
    raise AssertionError
"""
OTHER = "raise RuntimeError('holds no test for a GPU')"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text(OTHER)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    cost(n): x\n")
    return tmp_path


def last_line(suite: Path, *arguments: str, **more: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), **more}
    environment.pop("PYTEST_XDIST_WORKER", None)  # of the run that this test is part of
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_run", "-p", "no:cacheprovider", "-m", "gpu", *arguments]
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True).stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_last_line__counts_what_ran(suite: Path, workers: str) -> None:
    assert last_line(suite, "-n", workers) == "gpu: 8 of 9 tests ran, 1 failed, 1 skipped, sanitizer 3 of 3 cases"


@pytest.mark.slow
def test_last_line__of_both_halves(suite: Path) -> None:
    assert [last_line(suite, "--half", half) for half in "12"] == [
        "gpu: 5 of 9 tests ran (half 1 has 5), 0 failed, sanitizer 0 of unknown cases",
        "gpu: 3 of 9 tests ran (half 2 has 4), 1 failed, 1 skipped, sanitizer 3 of 3 cases",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_last_line__of_a_run_that_was_stopped(suite: Path, workers: str) -> None:
    assert last_line(suite, "-n", workers, STOP="1") == "gpu: 7 of 9 tests ran, 1 failed, 1 skipped, sanitizer 3 of 3 cases"


def test_last_line__of_a_run_out_of_time(suite: Path) -> None:
    assert last_line(suite, "--seconds", "0.001", STOP="1").startswith("gpu: ")


def test_halves__balance_each_file_and_the_whole() -> None:
    cost = {f"{file}::test_{i}": float(1 + (i * 7 + len(file)) % 12) for file in ("a", "bb", "ccc") for i in range(20)}
    placed = halves(cost)
    total: Counter[int | tuple[int, str]] = Counter()
    for name, half in placed.items():
        total[half] += cost[name]
        total[half, name.partition("::")[0]] += cost[name]
    assert abs(total[1] - total[2]) <= 12
    assert all(abs(total[1, file] - total[2, file]) <= 12 for file in ("a", "bb", "ccc"))
    assert halves(dict(reversed(cost.items()))) == placed
