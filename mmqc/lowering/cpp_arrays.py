"""Arrays of sizes in C++ wrappers, which Inductor (torch 2.11 to 2.14) takes for declared where they are not.

    with declared_arrays():            reinterpret_tensor_wrapper(buf134, 2, int_array_132, int_array_45, 0L)

An array is declared once by who writes it, known by an address: of the bound method, which is made anew each time, or (from
torch 2.13 on) of the buffer that it writes to.  Once that is gone, another one gets its address, and is taken for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

_array_var = CppWrapperCpu.codegen_int_array_var


@contextmanager
def declared_arrays() -> Iterator[None]:
    """C++ wrappers that are generated meanwhile keep whoever declared an array, so that no address comes twice."""
    with mock.patch.object(CppWrapperCpu, "codegen_int_array_var", _by_who_is_kept):
        yield


def _by_who_is_kept(wrapper: Any, int_array: str, writeline: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    kept = wrapper.__dict__.setdefault("_mmqc_writers", {})  # one bound method for each writer, which it keeps in turn
    key = id(getattr(writeline, "__self__", writeline)), getattr(writeline, "__func__", None)
    return _array_var(wrapper, int_array, kept.setdefault(key, writeline), *args, **kwargs)
