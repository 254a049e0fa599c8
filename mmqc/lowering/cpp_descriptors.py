"""Tensor descriptors in C++ wrappers, whose code Inductor (torch 2.11 to 2.15) writes half in C++ and half in Python.

    described(tensor)                  what a descriptor may be made of
    with descriptors_in_cpp():         buf.global_shape[0] = (s0//4);    ->    buf.global_shape[0] = c10::div_floor_integer(...);

A view's reference is C++, but stands in the block of Python that compiles the kernels, too; a size is Python, where "//" would
begin a comment: rows behind a tower's merger are a fourth of its patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sympy import Expr
from torch._inductor.codegen.cpp_utils import cexpr
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._inductor.ir import ExternKernel, InputsKernel, ReinterpretView, TensorBox
from torch._inductor.virtualized import V

_generate = CppWrapperGpu._generate_stable_tma_descriptor


@contextmanager
def descriptors_in_cpp() -> Iterator[None]:
    """C++ wrappers that are generated meanwhile have a descriptor's sizes in C++."""
    with mock.patch.object(CppWrapperGpu, "_generate_stable_tma_descriptor", _with_sizes):
        yield


def _with_sizes(wrapper: Any, descriptor: Any) -> None:
    tensor, write = descriptor.tensor, wrapper.writeline
    sizes = [s for s in (*tensor.get_size(), *tensor.get_stride()) if isinstance(s, Expr) and not s.is_Atom]
    said = {f" = {size};": f" = {cexpr(size)};" for size in sizes}

    def writeline(line: Any) -> None:
        python = next((end for end in said if isinstance(line, str) and line.endswith(end)), None)
        write(line if python is None else line.removesuffix(python) + said[python])

    with mock.patch.object(wrapper, "writeline", writeline):
        _generate(wrapper, descriptor)


class WholeBuffer(ReinterpretView):
    """A buffer in another shape or dtype whose reference in a C++ wrapper is the buffer's name: the address is the same.

    What a descriptor describes is written twice there, into the C++ code and into the Python block that compiles the kernels.
    The name means something in both, for that block makes a tensor of this name with the sizes of the view.
    """

    def codegen_reference(self, writer: Any = None) -> str:
        """The name, in C++."""
        return self.get_name() if V.graph.cpp_wrapper else super().codegen_reference(writer)


def described(tensor: Any) -> Any:
    """What a tensor descriptor may be made of in the graph's wrapper: ``tensor``, or the same in a buffer of its own."""
    if not V.graph.cpp_wrapper or not isinstance(tensor, ReinterpretView):
        return tensor
    made = V.graph.__dict__.setdefault("_mmqc_described", {})
    if id(tensor) not in made:
        made[id(tensor)] = tensor, _whole(tensor)  # with the key's owner, so that its id stays its own
    return made[id(tensor)][1]


def _whole(view: Any) -> Any:
    bytes_of = [math.prod(t.get_size()) * t.get_dtype().itemsize for t in (view, view.data)]
    same = V.graph.sizevars.statically_known_equals
    if same(view.get_layout().offset, 0) and same(*bytes_of):
        return WholeBuffer(data=view.data, layout=view.get_layout())
    copy: Any = ExternKernel.copy_input(TensorBox(view))
    return InputsKernel.unwrap_storage_for_input(copy)
