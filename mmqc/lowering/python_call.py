"""A call of a Python function in generated code, on buffers: what no launch of a graph can say, without PyTorch's dispatcher.

    call(function, args, outputs, runs)        module.function(*args)      in the wrapper, where ``runs`` is not 0

An arg is a tensor of the graph, a list of such or None, or a value that its ``repr`` says.  For wrappers in Python alone: a package
and a C++ wrapper have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from sympy import Expr
from torch._inductor.ir import ExternKernel, InputsKernel, IRNode, MutationOutput, NoneLayout
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
        module = self.function.__module__.rpartition(".")
        wrapper.add_import_once(f"from {module[0]} import {module[2]} as mmqc_{module[2]}")
        if self.once is not None:
            wrapper.add_import_once(self.once)
        with indented(wrapper, self.runs):
            wrapper.writeline(f"mmqc_{module[2]}.{self.function.__name__}({', '.join(map(_written, self.args))})")

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


def _written(arg: Any) -> str:
    if isinstance(arg, list):
        return f"({''.join(f'{_written(a)}, ' for a in arg)})"
    return arg.codegen_reference() if isinstance(arg, IRNode) else repr(arg)
