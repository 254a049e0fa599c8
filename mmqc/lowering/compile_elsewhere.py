"""Kernels of ours are compiled by the processes that compile Inductor's (kernels/shared/compile_elsewhere.py)."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

from torch._inductor.async_compile import AsyncCompile, get_compile_threads

from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.compile_elsewhere import Sent, compile_sent


@functools.cache
def start() -> None:
    """Let the processes begin, if Inductor has any; kernels are theirs as soon as they are there, some seconds from now."""
    if get_compile_threads() > 1:
        AsyncCompile.wakeup()
        compile_ahead.hand_over(submit)


def submit(known: Sent) -> Future[Any] | None:
    """Let one of them compile it; None if they are not there yet."""
    return AsyncCompile.process_pool().submit(compile_sent, known) if AsyncCompile.use_process_pool() else None
