"""One benchmark run on one GPU: deadline, results, failures, and how a kernel is timed.

Every timing is a CUDA graph over enough copies of the weight that the L2 cache holds none of them; medians of replays.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import triton

from benchmarks.command_line import command_line
from mmqc.kernels.shared.device_facts import gpu_name

ROOT = Path(__file__).resolve().parents[1]

L2_BYTES = 64 << 20
Calls = list[Callable[[], object]]
T = TypeVar("T")


class Run:
    """One run: device, deadline, results, failures."""

    def __init__(self, dry: bool, seconds: float):
        self.dry, self.end = dry, time.monotonic() + seconds
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float16 if dry else torch.bfloat16  # the interpreter computes bf16 wrongly
        self.failures: list[str] = []
        self.times: dict[str, dict[str, float]] = {}  # "shape/rows" -> contender -> microseconds
        self.bandwidth: dict[str, float] = {}
        self.same_bytes: dict[str, float] = {}  # entry of bandwidth -> what a copy of the same bytes reaches
        self.errors: dict[str, float] = {}
        self.tiles: dict[str, list[dict[str, object]]] = {}  # what was tuned -> every tile that was tried, the fastest first

    def left(self) -> float:
        return self.end - time.monotonic()

    def attempt(self, what: str, work: Callable[[], T], limit: int = 60) -> T | None:
        """Run one step; a failure, or a step over its limit, is recorded and None comes back."""
        if self.left() < 5:
            self.failures.append(f"{what}: no time left")
            return None

        def stop(*_: object) -> None:
            raise TimeoutError(f"over {limit} s")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(int(min(limit, max(1, self.left()))))
        try:
            return work()
        except Exception as error:  # what a peer or a compiler may raise is open-ended; it is reported
            self.failures.append(f"{what}: {type(error).__name__}: {str(error).strip()[:300]}")
            return None
        finally:
            signal.alarm(0)

    def copies(self, size: int) -> int:
        return 1 if self.dry else max(2, min(128, math.ceil(3 * L2_BYTES / size)))

    def microseconds(self, calls: Calls, replays: int = 20, budget: float = 0.08) -> float:
        """Median time of one call."""
        for call in calls[:3]:
            call()
        if self.dry:
            start = time.perf_counter()
            calls[0]()
            return 1e6 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

        def once() -> float:
            marks[0].record()
            graph.replay()
            marks[1].record()
            marks[1].synchronize()
            return marks[0].elapsed_time(marks[1])

        once()
        count = max(5, min(replays, int(1e3 * budget / max(once(), 1e-3))))
        return 1e3 * statistics.median(once() for _ in range(count)) / len(calls)


def arguments(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """Options of every benchmark that tunes: --out, --tune, --seconds, --dry."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--dry", action="store_true")
    return parser


def ceilings(run: Run) -> None:
    """Copy bandwidth (bytes read and written; the better of a memcpy and a kernel), and the bf16 rate of a large product."""
    size = 1 << (14 if run.dry else 28)
    source = torch.randn(size, device=run.device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    run.bandwidth["copy"] = max(8e-6 * size / run.microseconds([way]) for way in ways)
    side = 64 if run.dry else 8192
    a, b = (torch.randn(side, side, device=run.device).to(run.dtype) for _ in range(2))
    run.bandwidth["bf16 TFLOP/s"] = 2e-6 * side**3 / run.microseconds([lambda: a @ b])


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return error if math.isfinite(error) else math.inf


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def facts(run: Run) -> dict[str, str]:
    """What a file of results begins with: the command without the file's name, device, versions and commit."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return {
        "command": command_line(),
        "device": gpu_name(run.device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
    }
