"""Triton's interpreter without what it does in vain: more than half of the time of a kernel that calls functions.

- It replaces some hundred members of ``triton.language`` before a kernel runs, which is needed, and before each function that the
  kernel calls (``tl.sum`` and ``tl.zeros`` are such too), when they have been replaced: a millisecond a call.
- It computes again, in 64 bits, each sum and product of integers, compares it with the bounds of its type, and drops the outcome
  (``device_assert`` does nothing but in debug mode).
- It makes a table of all dtypes for each dtype that it looks up in it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any


def install() -> None:
    """For this process, if kernels are interpreted in it; an interpreter that is built otherwise is left as it is."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        semantic = interpreter.interpreter_semantic
        patch, run, dtype = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
        check_overflow = semantic.binary_op_sanitize_overflow_impl
    except (ImportError, AttributeError):
        return
    done: set[tuple[bool, bool]] | None = None  # in the kernel that runs: whose names of the language are replaced

    @functools.cache
    def modules_of(fn: Callable[..., Any]) -> tuple[bool, bool]:
        seen = {id(value) for value in fn.__globals__.values()}
        return id(tl) in seen, id(tl.core) in seen

    def patch_once(fn: Callable[..., Any]) -> Any:
        if done is None:  # a function that a test calls without a kernel
            return patch(fn)
        if (modules := modules_of(fn)) not in done:
            done.add(modules)
            return patch(fn)
        return None  # which nobody reads: a kernel, which puts back what it replaced, is the first to ask

    @functools.wraps(run)
    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done = set()
        try:
            return run(self, *args, **kwargs)
        finally:
            done = None

    of_scalar = functools.cache(dtype)

    def numpy_dtype(kind: Any) -> Any:
        return dtype(kind) if kind.scalar.is_ptr() else of_scalar(kind.scalar)  # types of blocks and pointers have no hash

    def check_if_told(*args: Any) -> None:
        if semantic.builder.options.debug:
            check_overflow(*args)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = run_kernel
    interpreter._get_np_dtype = numpy_dtype
    semantic.binary_op_sanitize_overflow_impl = check_if_told


install()
