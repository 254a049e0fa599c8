"""What holds for every test: one thread, no deadlines, and random data that a failure can be repeated with.

One thread, because the models are so small that a second one only waits, ten times longer than the work takes.  Inductor's pool
of processes stays away for the same reason: it is one per worker of pytest-xdist, each of whose processes imports torch.
"""

import gc
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

# Before torch is imported, for subprocesses too.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # of what calls the kernels in a package

import pytest
import torch
import torch.distributed as dist

import mmqc.backend
from mmqc.ops import integer_matmul

if find_spec("hypothesis"):  # which tests on a GPU do without
    import hypothesis

    # how long an example takes says how busy the machine is
    hypothesis.settings.register_profile("mmqc", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("mmqc")

pytest_plugins = ["gpu_run", "quick_dynamo", "quick_interpreter"]
GRIDS = {"kernels_tests", "ops_tests", "solvers_tests"}
CASES = 4  # of a test in them
LONGEST = {"test_backend_vlm", "test_cpp_runner", "test_export", "test_many_ranks", "test_run_time", "test_warm"}
torch.set_num_threads(1)
gc.disable()  # which would take a tenth of the run; until all tests are collected


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="of torch's random numbers in each test: a number, or 'fresh'")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("seed") == "fresh":  # before the workers of pytest-xdist start, which get the number
        config.option.seed = str(time.time_ns() % 2**32)


@pytest.hookimpl(tryfirst=True)  # before "-m 'not slow'" is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a grid of sizes and types a few cases, on CPUs, are left in ``make test``; and the longest tests come first.

    A worker that comes to one of those when the others are done would be alone with it.
    """
    of_grids = [i for i in items if GRIDS & set(i.path.parts) and not any(map(i.get_closest_marker, ("gpu", "slow")))]
    of_grids.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # as good as at random, and the same every time
    met = Counter[str]()
    for item in of_grids:
        test = item.nodeid.partition("[")[0]
        met[test] += 1
        if met[test] > CASES:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish() -> None:
    """What was imported stays, a million objects that the collector need not look at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('seed')}"


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Each test has numbers of its own, whichever tests ran before it."""
    torch.manual_seed(int(request.config.getoption("seed")) + zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def integer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of codes are ``_int_mm`` on CPUs too where that is slower than float64."""
    monkeypatch.setattr(integer_matmul, "cpu_int_mm_is_a_loop", lambda: False)


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone: what is sent is traced as with others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the graphs that the backend made as they are."""
    monkeypatch.setattr(mmqc.backend, "_lower", lambda gm, inputs, request, record: gm.forward)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
