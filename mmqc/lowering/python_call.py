"""A call of a Python function in generated code, on buffers: what no launch of a graph can say, without PyTorch's dispatcher.

    call(function, args, outputs, runs)             module.function(*args)          in the wrapper, where ``runs`` is not 0
    result(function, inputs, constants, layout)     y = module.function(*args)      args: inputs, then constants

An arg of ``call`` is a tensor of the graph, a list of such or None, or a value that its ``repr`` says.  For wrappers in Python: a
package and a C++ wrapper have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from sympy import Expr
from torch._inductor.ir import (
    ExternKernel,
    ExternKernelAlloc,
    FixedLayout,
    InputsKernel,
    IRNode,
    MutationOutput,
    NoneLayout,
    StorageBox,
)
from torch._inductor.virtualized import V

from mmqc.lowering.inductor import TensorBox, indented


def has_python() -> bool:
    """Whether the wrapper of the graph that is being lowered is in Python."""
    return not (V.graph.aot_mode or V.graph.cpp_wrapper)


def call(
    function: Callable[..., None], args: Sequence[Any], outputs: Sequence[TensorBox], runs: Any = None, once: str | None = None
) -> None:
    """Put it into the graph: it writes ``outputs``, which are among its args.  ``once``: a line for when the code is loaded."""
    _PythonCall(function, args, outputs, runs, once)


def result(function: Callable[..., Any], inputs: Sequence[TensorBox], constants: Sequence[Any], like: FixedLayout) -> TensorBox:
    """Put it into the graph: it makes a tensor ``like`` that; constants are sizes and what Python can write."""
    made: Any = _Result(function, [ExternKernel.realize_input(box) for box in inputs], constants, like)
    return TensorBox(StorageBox(made))


class _Result(ExternKernelAlloc):
    """The call, as an operation that makes its output."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any], constants: Sequence[Any], like: FixedLayout) -> None:
        self.function = function
        name = f"{_alias(function)}.{function.__name__}"
        super().__init__(like, inputs, tuple(constants), python_kernel_name=name)

    def codegen(self, wrapper: Any) -> None:
        """The line."""
        _import(wrapper, self.function)
        super().codegen(wrapper)


class _PythonCall(ExternKernel):
    """The call, as an operation that changes its outputs."""

    def __init__(
        self, function: Callable[..., None], args: Sequence[Any], outputs: Sequence[TensorBox], runs: Any, once: str | None
    ) -> None:
        inputs: list[IRNode] = []

        def realized(arg: Any) -> Any:
            if isinstance(arg, (list, tuple)):
                return [realized(a) for a in arg]
            if not isinstance(arg, IRNode):
                return arg
            value: Any = InputsKernel.unwrap_storage_for_input(self.realize_input(arg))
            inputs.append(value)
            return value

        self.args, self.function, self.runs, self.once = realized(args), function, runs, once
        self.device: Any = inputs[0].get_device()
        super().__init__(None, NoneLayout(device=self.device), inputs)
        self.mutation_outputs = [MutationOutput(NoneLayout(device=self.device), box, self) for box in outputs]
        V.graph.register_operation(self)

    def codegen(self, wrapper: Any) -> None:
        """The line, under its condition."""
        _import(wrapper, self.function)
        if self.once is not None:
            wrapper.add_import_once(self.once)
        with indented(wrapper, self.runs):
            wrapper.writeline(f"{_alias(self.function)}.{self.function.__name__}({', '.join(map(_written, self.args))})")

    def get_outputs(self) -> list[Any]:
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device | None:
        return self.device

    def get_unbacked_symbol_defs(self) -> Any:
        return set()

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        """Those of the condition beside those of the operands."""
        used = super().get_free_symbol_uses(unbacked_only)
        own = self.runs.free_symbols if isinstance(self.runs, Expr) and not unbacked_only else set[sympy.Symbol]()
        return used | own


def _alias(function: Callable[..., Any]) -> str:
    return "mmqc_" + function.__module__.rpartition(".")[2]


def _import(wrapper: Any, function: Callable[..., Any]) -> None:
    module = function.__module__.rpartition(".")
    wrapper.add_import_once(f"from {module[0]} import {module[2]} as {_alias(function)}")


def _written(arg: Any) -> str:
    if isinstance(arg, list):
        return f"({''.join(f'{_written(a)}, ' for a in arg)})"
    return arg.codegen_reference() if isinstance(arg, IRNode) else repr(arg)
