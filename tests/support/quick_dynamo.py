"""Dynamo without what it does at the end of each compilation for people who study Dynamo: a seventh of a test that compiles.

It empties the processor's caches to measure how long the guards take (20 ms), and writes what it did as JSON for the handlers of a
logger that has none elsewhere: those with which pytest collects what a failed test logged.

Nor is what an operator does to sizes kept for the next layer: models here have two, and an entry takes as long as the operator.
With 28 layers it is worth its time, so mmqc leaves it on, and so do the processes that a test starts.
"""

from __future__ import annotations

import torch._dynamo.config
import torch._dynamo.guards
from torch._logging import _internal as logs


def install() -> None:
    """For this process."""
    torch._dynamo.config.fake_tensor_cache_enabled = False
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0  # type: ignore[attr-defined]
    logs.trace_log.handlers.clear()
    logs.trace_log.addHandler = lambda handler: None  # type: ignore[method-assign]


install()
