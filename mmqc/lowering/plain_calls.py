"""Compiled graphs without Inductor's CUDA graphs for a while: so that whoever records a whole call can call them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["plain_calls"]

_plain: ContextVar[bool] = ContextVar("graphs run without CUDA graphs of their own", default=False)


@contextmanager
def plain_calls() -> Iterator[None]:
    """What this thread calls runs kernel by kernel, where it would have been warmed up, recorded or replayed."""
    _teach()
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


@functools.cache
def _teach() -> None:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    original = CUDAGraphTreeManager.run

    @functools.wraps(original)
    def run(self: Any, new_inputs: Any, function_id: Any) -> Any:
        if _plain.get():  # what the manager itself does with a graph that it cannot record
            return self.ids_to_funcs[function_id].model(new_inputs)
        return original(self, new_inputs, function_id)

    CUDAGraphTreeManager.run = run  # type: ignore[method-assign]
