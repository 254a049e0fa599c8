"""Triton kernels that Inductor generated, changed to start before the kernel in front has ended (kernels/shared/early_start.py).

    def triton_poi_fused_add(in_ptr0, out_ptr0, xnumel, XBLOCK):            triton_meta={'launch_pdl': True, ...}
        tl.extra.cuda.gdc_wait()                    <- added
        tl.extra.cuda.gdc_launch_dependents()       <- added
        xnumel = 3584 ...

Why:     in a CUDA graph of some hundred small kernels each waits for the launch of the next, about a microsecond.  Inductor's own
         ``triton.enable_pdl`` waits in front of the first load that depends on the kernel before, so a kernel that loads nothing
         does not wait at all, and the one behind it may read what an older one still writes.  Here every kernel waits, first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from mmqc.lowering.early_cpp import launching_early

_starts_early: ContextVar[bool] = ContextVar("kernels start before the one in front has ended", default=False)
_PLAIN = "'launch_pdl': False"
_EARLY = "'launch_pdl': True"
_META = "triton_meta={"
_DEFINITION = re.compile(r"@triton\.jit\n[ \t]*def [^\n]*:\n(?P<indent>[ \t]+)")
_CALLS = ("tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()")


def launched_early(source: str) -> str:
    """The source of a kernel that waits itself, with the option for its launch; as it was where it has no options."""
    if _PLAIN in source:
        return source.replace(_PLAIN, _EARLY, 1)
    return source if _EARLY in source else source.replace(_META, f"{_META}{_EARLY}, ", 1)


def early(source: str) -> str:
    """The source of a generated kernel, the last function in it, so that it waits and is launched early; or as it was."""
    found = list(_DEFINITION.finditer(source))
    changed = launched_early(source)
    if not found or _EARLY not in changed or _CALLS[0] in source:
        return source
    at, indent = found[-1].start("indent"), found[-1]["indent"]
    shift = len(changed) - len(source) if changed.index(_EARLY) < at else 0
    at += shift
    return changed[:at] + "".join(f"{indent}{call}\n" for call in _CALLS) + changed[at:]


def can_start_early(x: Any) -> bool:
    """Whether x is on a device with programmatic dependent launch."""
    return (
        isinstance(x, torch.Tensor) and x.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(x.device)[0] >= 9
    )


def starts_early() -> bool:
    """Whether the kernels of the graph that is being compiled start early."""
    return _starts_early.get()


@contextmanager
def starting_early(scheduling: Any, whether: bool) -> Iterator[None]:
    """While a graph is compiled: kernels that ``scheduling``, Inductor's class for Triton, defines are changed."""
    _teach(scheduling)
    token = _starts_early.set(whether)
    try:
        with launching_early() if whether else nullcontext():
            yield
    finally:
        _starts_early.reset(token)


@functools.cache
def _teach(scheduling: Any) -> None:
    define = scheduling.define_kernel

    def define_early(self: Any, source: str, *args: Any, **kwargs: Any) -> Any:
        return define(self, early(source) if _starts_early.get() else source, *args, **kwargs)

    scheduling.define_kernel = define_early


@contextmanager
def early_definitions(wrapper: Any) -> Iterator[None]:
    """Kernels of ours that are defined here are launched early: Inductor has that option for its own kernels alone."""
    define = wrapper.define_kernel

    def define_early(name: str, body: str, *args: Any, **kwargs: Any) -> Any:
        return define(name, launched_early(body), *args, **kwargs)

    wrapper.define_kernel = define_early
    try:
        yield
    finally:
        del wrapper.define_kernel
