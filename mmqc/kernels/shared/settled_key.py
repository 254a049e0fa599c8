"""A kernel's key in Triton's cache, the same in every process.

Triton's key of a function holds the constants of the functions that it calls only if those had keys of their own before (3.6 and
3.7: ``DependenciesFinder._update_hash`` takes them first and asks for the key afterwards).  So the key of a kernel depended on
which kernels the process had compiled before, and what one process had made another made again.
"""

from __future__ import annotations

import threading
from typing import Any

from triton.runtime.jit import JITFunction

_settled: dict[int, Any] = {}  # by address, which stays theirs: a function's own hash is its key
_lock = threading.Lock()  # threads compile, and share what their kernels call


def settle(kernel: Any) -> None:
    """Give the functions that this one calls their keys, then itself."""
    if isinstance(kernel, JITFunction) and id(kernel) not in _settled:
        with _lock:
            _settle(kernel, set())


def _settle(function: Any, begun: set[int]) -> None:
    if not isinstance(function, JITFunction) or id(function) in _settled or id(function) in begun:
        return
    begun.add(id(function))
    for name in function.fn.__code__.co_names:
        _settle(function.fn.__globals__.get(name), begun)
    _ = function.cache_key
    _settled[id(function)] = function
