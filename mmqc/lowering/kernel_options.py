"""A Triton kernel with its numbers of warps and stages, as Inductor takes a kernel that somebody else wrote."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


@functools.cache
def with_options(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """The kernel, autotuned over one configuration.

    It is of a function of its own: of two launches of a graph that differ in warps and stages alone Inductor (torch 2.11 to 2.13)
    makes one kernel.
    """
    import triton

    own = copy.copy(kernel)
    own.fn = _twin(kernel.fn)
    return triton.autotune([triton.Config({}, num_warps=num_warps, num_stages=num_stages)], key=[])(own)


def _twin(function: Any) -> Callable[..., Any]:
    """Another object that is the same function."""
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made = functools.update_wrapper(made, function)
    del made.__wrapped__
    return made
