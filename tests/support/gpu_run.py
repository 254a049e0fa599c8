"""A pytest plugin for runs on a GPU (``-m gpu``): half of the tests, an end in time, and a last line that says how much ran.

    pytest -m gpu --half 1 --seconds 540 -n 14

``--half`` keeps the parameters of a test together, as they share compiled kernels; it depends on nothing but the tests' names.
"""

import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

GPU_TEST = re.compile(r"mark\.gpu|def test_\w+\([^)]*\bdevice\b")  # a mark, or the fixture of tests/kernels_tests/conftest.py


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "runs on a GPU")
    group.addoption("--half", type=int, choices=[1, 2], help="run this half of the selected tests")
    group.addoption("--seconds", type=float, help="stop after this time, as Ctrl-C does")


def pytest_configure(config: pytest.Config) -> None:
    if re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        config.pluginmanager.register(GpuRun(config), "gpu_run_of_this_session")


def halves(cost: dict[str, float]) -> dict[str, int]:
    """Every test's half: from the dearest down, each into the half that is cheaper so far, in its file and in all.

    Its file, because tests of one file cost alike, and what a test costs is known by the number of its parameters only.
    """
    total: Counter[int | tuple[int, str]] = Counter()
    placed: dict[str, int] = {}
    for name in sorted(cost, key=lambda name: (-cost[name], name)):
        file = name.partition("::")[0]
        placed[name] = half = min((1, 2), key=lambda half: total[half] + total[half, file])
        total[half] += cost[name]
        total[half, file] += cost[name]
    return placed


class GpuRun:
    """Selects, counts and ends one run.  Where pytest-xdist runs the tests, its workers select and the main process counts."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.ended = config, Counter[str]()
        self.whole = self.selected = 0
        self.sanitized, self.kernels = 0, 0
        self.is_worker = hasattr(config, "workerinput")
        if not self.is_worker:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever stops the run gets its last line

    @pytest.hookimpl(trylast=True)  # once everybody is there who has a part in ending
    def pytest_sessionstart(self) -> None:
        """Start the clock."""
        if self.config.getoption("seconds") and not self.is_worker:
            timer = threading.Timer(self.config.getoption("seconds"), os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Do not import what holds no test for a GPU."""
        if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
            return None
        return None if GPU_TEST.search(collection_path.read_text(encoding="utf-8")) else True

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        whole, half = len(items), self.config.getoption("half")
        if half:
            cost = Counter[str]()
            for item in items:
                cost[group_of(item)] += cost_of(item)
            placed = halves(dict(cost))
            self.config.hook.pytest_deselected(items=[i for i in items if placed[group_of(i)] != half])
            items[:] = [i for i in items if placed[group_of(i)] == half]
        for item in items:
            item.user_properties.append(("gpu_run", (whole, len(items))))
        self.whole, self.selected = whole, len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        given = dict(report.user_properties)
        self.whole, self.selected = given.get("gpu_run", (self.whole, self.selected))
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.ended[report.outcome] += 1
            done, self.kernels = given.get("sanitizer", (0, self.kernels))
            self.sanitized += done
        elif report.failed:  # in teardown, of a test that was counted
            self.ended["failed"] += 1
            self.ended["counted"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.ended["not collected"] += report.failed

    def last_line(self) -> str:
        ended = self.ended
        ran = ended["passed"] + ended["failed"] - ended["counted"]
        parts = [f"gpu: {ran} of {self.whole} tests ran"]
        if self.config.getoption("half"):
            parts[0] += f" (half {self.config.getoption('half')} has {self.selected})"
        parts.append(f"{ended['failed']} failed")
        parts += [f"{ended[word]} {word}" for word in ("skipped", "not collected") if ended[word]]
        parts.append(f"sanitizer {self.sanitized} of {self.kernels or 'unknown'} cases")
        return ", ".join(parts)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if not self.is_worker and not self.config.getoption("collectonly"):
            print(self.last_line(), flush=True)


def group_of(item: pytest.Item) -> str:
    """What stays in one half: a test with all its parameters, but for a test that says what each of them costs."""
    return item.nodeid if item.get_closest_marker("cost") else item.nodeid.partition("[")[0]


def cost_of(item: pytest.Item) -> float:
    """In units of a usual test."""
    marker = item.get_closest_marker("cost")
    return marker.args[0] if marker else 1.0
