"""A kernel's key does not depend on what the process made a key for before."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from mmqc.kernels.shared import settled_key
from mmqc.kernels.shared.settled_key import settle
from mmqc.versions import numbers

LIMIT = tl.constexpr(3.0)
helper: Any = None


def plain_helper(x):
    return x + LIMIT


def plain_kernel(x_ptr):
    tl.store(x_ptr, helper(tl.load(x_ptr)))


def made(known_before: bool, settled: bool) -> str:
    """The key of a kernel whose helper has a key of its own before, or not."""
    globals()["helper"] = JITFunction(plain_helper)
    kernel = JITFunction(plain_kernel)
    if known_before:
        _ = helper.cache_key
    if settled:
        settle(kernel)
    return kernel.cache_key


def test_settle__the_key_is_the_same_whatever_came_before():
    assert made(True, True) == made(False, True)


def test_settle__a_thread_waits_for_one_that_settles_the_same_helpers():
    """Else it would take the key of a kernel whose helpers are under way."""
    globals()["helper"] = JITFunction(plain_helper)
    kernel = JITFunction(plain_kernel)
    thread = threading.Thread(target=settle, args=(kernel,))
    with settled_key._lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert kernel.hash is None
    thread.join()
    assert kernel.cache_key == made(True, True)


@pytest.mark.skipif(numbers(triton.__version__) >= (3, 8), reason="Triton 3.8 settles its keys itself")
def test_settle__triton_still_needs_it():
    """Where this fails Triton's keys are settled by themselves, and ``settle`` can go with the versions before."""
    assert made(True, False) != made(False, False)
