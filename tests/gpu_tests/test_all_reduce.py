"""Sums of two GPUs through memory that they share: in CUDA graphs, with fresh numbers a hundred times, equal on both to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
WAYS = ("words", "fused")
ROWS = ("1", "16", "917")  # the last ones with a flag a row


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_all_reduce__of_few_rows_and_many_is_the_sum_and_what_follows(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    words = ["--out", str(out), "--seconds", "150", "--rows", *ROWS, "--widths", "3584", "--ways", *WAYS]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.micro.all_reduce", *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())["microseconds"]
    assert {(size, way) for size, times in found.items() for way, took in times.items() if isinstance(took, float)} == {
        (f"{rows} x 3584", way) for rows in ROWS for way in WAYS
    }, found
