"""Every kernel alone, under compute-sanitizer's memcheck and under racecheck, a part of them a test."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_sanitizer import kernels_with, sanitize, table

PARTS = 4


@pytest.mark.gpu
@pytest.mark.cost(12)  # three processes that import torch, two of them under a tool
@pytest.mark.parametrize("part", [f"{i + 1}/{PARTS}" for i in range(PARTS)])
def test_sanitizer__finds_no_error(part: str, record_property: Callable[[str, Any], None]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    data = sanitize(seconds=180, part=part)
    skipped = kernels_with(data, "skipped")
    record_property("sanitizer", (len(data["kernels"]) - len({*skipped, *kernels_with(data, "errors")}), data["of"]))
    assert data["kernels"]
    assert not kernels_with(data, "errors"), table(data)
    if skipped:
        pytest.skip(f"{len(skipped)} kernels have no verdict:\n{table(data)}")


@pytest.mark.slow
def test_sanitizer__calls_run_in_the_interpreter() -> None:
    kernels = sanitize(seconds=500, dry=True, part="8/16")["kernels"]
    assert len(kernels) >= 3
    assert {name: row["alone"] for name, row in kernels.items()} == dict.fromkeys(kernels, "clean")
