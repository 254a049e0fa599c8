"""A kernel's key in Triton's cache, the same in every process.

Triton's key of a function holds the constants of the functions that it calls only if those had keys of their own before (3.6 and
3.7: ``DependenciesFinder._update_hash`` takes them first and asks for the key afterwards).  So the key of a kernel depended on
which kernels the process had compiled before, and what one process had made another made again.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import JITFunction

_settled: set[int] = set()  # by address: a kernel's own hash is its key


def settle(kernel: Any) -> None:
    """Give the functions that this one calls their keys, then itself."""
    if id(kernel) in _settled or not isinstance(kernel, JITFunction):
        return
    _settled.add(id(kernel))
    function = kernel.fn
    for name in function.__code__.co_names:
        settle(function.__globals__.get(name))
    _ = kernel.cache_key
