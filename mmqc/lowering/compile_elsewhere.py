"""Kernels of ours are compiled by the processes that compile Inductor's (kernels/shared/compile_elsewhere.py)."""

from __future__ import annotations

import functools

from torch._inductor import async_compile

from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.compile_elsewhere import compile_sent


@functools.cache
def start() -> None:
    """Let the processes begin, if Inductor has any; kernels are theirs from here on."""
    if async_compile.get_compile_threads() <= 1:
        return
    async_compile.AsyncCompile.wakeup()
    compile_ahead.hand_over(lambda known: async_compile.AsyncCompile.process_pool().submit(compile_sent, known))
