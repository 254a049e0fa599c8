"""A function in C++ in the generated code of a CPU, where Inductor's own loops will not do.

    y = call_cpp(name, {"x": x, ...}, size, dtype, before, body)        body reads x[...], and fills y[0 .. size)

It is a template of Inductor's, so it is compiled with the graph's other kernels, and is part of a package without Python.  There
the functions share a file: what stands ``before`` them is guarded against a second time, and knows nothing of sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sympy import Integer

from mmqc.lowering.inductor import (
    CppTemplate,
    ExternKernel,
    FixedLayout,
    TensorBox,
    contiguous,
    get_export_declaration,
    lowerings,
    parallel_num_threads,
    pick_vec_isa,
)

aten = torch.ops.aten


class CppFunction(CppTemplate):
    """A function in C++, given as text: ``before`` it, and its body."""

    def __init__(self, name: str, inputs: Mapping[str, Any], layout: Any, before: str, body: str) -> None:
        super().__init__(name, list(inputs.values()), layout, parallel_num_threads())
        self.names, self.before, self.body = tuple(inputs), before, body

    def render(self, kernel: Any, template_buffer_node: Any = None, epilogue_nodes: Any = None, **_: Any) -> str:  # type: ignore[override]
        """The source; nothing can be fused into it."""
        assert not epilogue_nodes, "its result has one element more than anybody reads"
        y = self.output_node if template_buffer_node is None else template_buffer_node
        head = kernel.def_kernel(inputs=dict(zip(self.names, self.input_nodes, strict=True)), outputs={"y": y})
        parts = self.header().getvalue(), self.before, f'extern "C" {get_export_declaration()}', head
        return "\n".join((*parts, f"{{ {kernel.maybe_codegen_profile()} {self.body} }}"))


def is_plain(box: TensorBox) -> bool:
    """Whether it is a whole buffer in row-major order, from its first byte on."""
    node = ExternKernel.realize_input(box)
    layout = node.get_layout()
    return layout.offset == 0 and layout.is_contiguous()


def whole(x: TensorBox) -> TensorBox:
    """X, or a copy, as ``is_plain`` has it."""
    if is_plain(x):
        return x
    x = lowerings[aten.clone.default](x, memory_format=torch.contiguous_format)
    x.realize()
    return contiguous(x)


def has_vectors() -> bool:
    """Whether Inductor has vectors for this CPU."""
    return bool(pick_vec_isa())


def call_cpp(name: str, inputs: Mapping[str, TensorBox], size: int, dtype: torch.dtype, before: str, body: str) -> TensorBox:
    """[size] as ``body`` fills it, from ``y`` on; ``inputs`` (``is_plain``) have their names there, as pointers to their data."""
    given = {key: ExternKernel.realize_input(box) for key, box in inputs.items()}
    first = next(iter(inputs.values()))
    # Inductor fuses an epilogue only into all of a result: the spare element keeps it out.
    layout = FixedLayout(first.get_device_or_error(), dtype, [Integer(size + 1)])
    made: Any = CppFunction(name, given, layout, before, body).generate().output_node()
    return lowerings[aten.slice.Tensor](made, 0, 0, size)
