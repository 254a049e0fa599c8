"""Triton's interpreter without what it does in vain: more than half of the time of a kernel that calls functions.

- It replaces some hundred members of ``triton.language`` before a kernel runs, which is needed, and before each function that the
  kernel calls (``tl.sum`` and ``tl.zeros`` are such too), when they have been replaced: a millisecond a call.
- It computes again, in 64 bits, each sum and product of integers, compares it with the bounds of its type, and drops the outcome
  (``device_assert`` does nothing but in debug mode).
- It makes a table of all dtypes for each dtype that it looks up in it.

And what it does wrong: a comparison of scalars that meets one of blocks is a block of integers (Triton 3.9), not a mask.
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
        from triton.runtime import interpreter

        semantic, executor = interpreter.interpreter_semantic, interpreter.GridExecutor
        replaced = once_a_kernel(interpreter._patch_lang, executor.__call__)
        splat = as_truths(interpreter.InterpreterBuilder.create_splat)
        dtype, check = of_scalars(interpreter._get_np_dtype), if_heard(semantic, semantic.binary_op_sanitize_overflow_impl)
    except (ImportError, AttributeError):
        return
    interpreter._patch_lang, executor.__call__ = replaced
    interpreter.InterpreterBuilder.create_splat = splat
    interpreter._get_np_dtype, semantic.binary_op_sanitize_overflow_impl = dtype, check


def once_a_kernel(patch: Callable[[Any], Any], run: Callable[..., Any]) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """Both, so that a function finds the language as its kernel, or one that was called before, has left it."""
    import triton.language as tl

    done: set[tuple[bool, bool]] | None = None  # in the kernel that runs: under which names it has been replaced

    @functools.cache
    def names_of(fn: Callable[..., Any]) -> tuple[bool, bool]:
        seen = {id(value) for value in fn.__globals__.values()}
        return id(tl) in seen, id(tl.core) in seen

    def patch_once(fn: Callable[..., Any]) -> Any:
        if done is None:  # a function that a test calls without a kernel
            return patch(fn)
        if (names := names_of(fn)) not in done:
            done.add(names)
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

    return patch_once, run_kernel


def of_scalars(dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A block's dtype is its elements'; types of blocks and of pointers have no hash."""
    of_scalar = functools.cache(dtype)
    return lambda kind: dtype(kind) if kind.scalar.is_ptr() else of_scalar(kind.scalar)


def as_truths(splat: Callable[..., Any]) -> Callable[..., Any]:
    """A truth fills a block of truths."""

    @functools.wraps(splat)
    def create_splat(self: Any, kind: Any, arg: Any) -> Any:
        found = splat(self, kind, arg)
        if arg.data.dtype == bool:
            found.data = found.data.astype(bool)
        return found

    return create_splat


def if_heard(semantic: Any, check: Callable[..., None]) -> Callable[..., None]:
    return lambda *args: check(*args) if semantic.builder.options.debug else None


install()
