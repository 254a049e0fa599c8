"""Triton kernels of generated code, launched without Inductor's and Triton's own way from their second launch on.

    async_compile.wait(globals())
    mmqc_quick_launch.quicken(globals())        <- added behind it

Why:     between ``kernel.run(...)`` in generated code and the function in C that launches there are 20 to 50 microseconds of
         Python: allocators, hooks and options that are looked up each time and are always the same.  A prompt has some 700 such
         launches, and the device needs less for many of them.
Else:    a kernel that is tuned by its launches, that asks for memory of Triton's own, or of a version with other functions in C,
         is launched as it was.  While a profiler runs, launches are in its record as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch.autograd import profiler

from mmqc.kernels.shared.direct_launch import options_of
from mmqc.lowering.joined_cpp import when_waited

_quick: ContextVar[bool] = ContextVar("kernels of the graph that is being compiled are launched quickly", default=False)


def quicken(names: Mapping[str, Any]) -> None:
    """From its second launch on, each kernel among these values is launched quickly, those included that are still compiled."""
    _store_as_made()

    def all_of_them() -> None:
        for kernel in names.values():
            if type(kernel) is CachingAutotuner and not kernel.inductor_meta.get("coordinate_descent_tuning"):
                _after_first(kernel)

    when_waited(all_of_them)


def _store_as_made() -> None:
    """Inductor's cache of graphs takes a kernel that an earlier graph of the process has launched already, and pickles it."""
    state: Any = CachingAutotuner.__getstate__
    if getattr(state, "as_made", False):
        return

    def as_made(self: Any) -> dict[str, Any]:
        return {name: value for name, value in state(self).items() if name != "run"}

    as_made.as_made = True  # type: ignore[attr-defined]
    CachingAutotuner.__getstate__ = as_made


def _after_first(kernel: Any) -> None:
    ordinary = kernel.run

    def run(*args: Any, stream: int, **kwargs: Any) -> Any:
        result = ordinary(*args, stream=stream, **kwargs)
        if len(kernel.launchers) == 1:
            kernel.run = quick(kernel.launchers[0], kernel.inductor_meta.get("kernel_name", "triton kernel")) or ordinary
        return result

    kernel.run = run


def quick(launcher: Any, name: str) -> Callable[..., None] | None:
    """What ``launcher``, as Inductor generates one, does, by the function in C; None if it is not known which that is."""
    known = launcher.__globals__
    if getattr(launcher, "store_cubin", False) or "runner" not in known:
        return None
    static = getattr(launcher, "_is_static", False)
    runner = _static(known["runner"], name) if static else _by_triton(known.get("bin"), name)
    if runner is None:
        return None
    changed = {**known, "runner": runner, "bin": _NoMetadata}
    made = FunctionType(launcher.__code__, changed, launcher.__name__, launcher.__defaults__, launcher.__closure__)
    made.__kwdefaults__ = launcher.__kwdefaults__
    return made


class _NoMetadata:
    """A compiled kernel, to a launcher that asks for what only hooks of launches read."""

    @staticmethod
    def launch_metadata(*_args: Any) -> None:
        return None


def _recorded(name: str, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """A launch as a profiler's record has it, while one runs."""
    return _RecordFunctionFast(name, args, {}) if profiler._is_profiler_enabled else _NOBODY  # type: ignore[attr-defined]


_NOBODY = nullcontext()


def _static(runner: Any, name: str) -> Callable[..., None] | None:
    """By the function of Inductor's own launcher; ``runner``: a bound method of its kernel."""
    kernel = getattr(runner, "__self__", None)
    needed = ("C_impl", "function", "num_warps", "shared", "arg_tys", "has_global_scratch", "has_profile_scratch")
    if kernel is None or torch.version.hip or not all(hasattr(kernel, each) for each in needed):
        return None
    launch, function = getattr(kernel.C_impl, "_launch_kernel", None), kernel.function
    if launch is None or function is None:
        return None
    scratch = kernel.has_global_scratch + kernel.has_profile_scratch  # arguments of Triton's own, for which no memory is needed
    warps, shared, kinds, none = kernel.num_warps, kernel.shared, kernel.arg_tys + "O" * scratch, (None,) * scratch

    def run(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        with _recorded(name, args):
            launch(function, x, y, z, warps, shared, kinds, (*args, *none), stream)

    return run


def _by_triton(compiled: Any, name: str) -> Callable[..., None] | None:
    """By Triton's function, as direct_launch.py knows it; a tensor descriptor is made into what that takes on the way."""
    options = None if compiled is None else options_of(compiled)
    if compiled is None or options is None:
        return None
    launch = compiled.run.launch

    def run(
        x: int, y: int, z: int, stream: int, _function: Any, _packed: Any, _metadata: Any, _enter: Any, _exit: Any, *args: Any
    ) -> None:
        with _recorded(name, args):
            launch(x, y, z, stream, *options, *args)

    return run


@contextmanager
def launching_quickly(wrapper: Any) -> Iterator[None]:
    """While a graph is compiled: code that ``wrapper``, Inductor's class for wrappers in Python, generates calls ``quicken``."""
    _teach(wrapper)
    token = _quick.set(True)
    try:
        yield
    finally:
        _quick.reset(token)


def _teach(wrapper: Any) -> None:
    wait = wrapper.write_async_compile_wait
    if getattr(wait, "quick", False):
        return

    def wait_and_quicken(self: Any) -> None:
        wait(self)
        if _quick.get() and not (V.graph.aot_mode or V.graph.cpp_wrapper):
            module, _, name = __name__.rpartition(".")
            self.prefix.splice(f"\nfrom {module} import {name} as mmqc_{name}\nmmqc_{name}.quicken(globals())\n")

    wait_and_quicken.quick = True  # type: ignore[attr-defined]
    wrapper.write_async_compile_wait = wait_and_quicken
