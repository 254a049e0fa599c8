"""Kernels are compiled by other processes into Triton's cache on disk, from which this one loads them.

    use(submit)                     submit(function, *args)  ->  Future, or None where there are no other processes
    with elsewhere(kernel):  ...    what this thread has Triton compile of the kernel, another process compiles first

Why:     what makes Triton's IR is Python: the kernels of a model take ten seconds of it, in threads beside the one that traces the
         model.  Without ``use``, or if anything fails there, a kernel is compiled here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton import knobs

logger = logging.getLogger(__name__)
PATIENCE = 300  # seconds
Submit = Callable[..., "Future[Any] | None"]

_submit: list[Submit] = []
_here = threading.local()


def use(submit: Submit) -> None:
    """Whom to ask."""
    _submit[:] = [submit]


@contextmanager
def elsewhere(kernel: Any) -> Iterator[None]:
    """For this thread, while a launch of ``kernel`` is compiled."""
    if torch.cuda.is_available() and hasattr(kernel, "device_caches"):
        kernel.device_caches[torch.cuda.current_device()]  # a kernel has no compiler before a device asked for it
    if _submit and hasattr(kernel, "compile") and not isinstance(kernel.compile, _Elsewhere):
        kernel.compile = _Elsewhere(kernel, kernel.compile)
    _here.asks = True
    try:
        yield
    finally:
        _here.asks = False


class _Elsewhere:
    """In the place of a kernel's compiler."""

    def __init__(self, kernel: Any, compiler: Callable[..., Any]) -> None:
        self.kernel, self.compiler = kernel, compiler

    def __call__(self, src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        if getattr(_here, "asks", False):
            of = self.kernel.fn.__module__, self.kernel.fn.__qualname__
            made_of = type(src), src.signature, src.constants, src.attrs
            try:
                asked = _submit[0](into_cache, *of, made_of, target, options, knobs.cache.dir)
                if asked is not None:
                    asked.result(PATIENCE)
            except Exception as error:
                logger.debug("%s.%s is compiled here: %s: %s", *of, type(error).__name__, error)
        return self.compiler(src, target=target, options=options, **more)


def into_cache(module: str, name: str, made_of: tuple[Any, ...], target: Any, options: Any, directory: str) -> None:
    """What the other process does: it needs no GPU.  ``made_of``: the class of the source, signature, constants, attributes."""
    kernel: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    with knobs.cache.scope():
        knobs.cache.dir = directory
        triton.compile(made_of[0](kernel, *made_of[1:]), target=target, options=options)
