"""What a tensor descriptor is made of, in wrappers of both languages; the launches themselves are in gpu_tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sympy import Integer, Max, Min
from tolerance import assert_close
from torch import fx
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernelOut, FixedLayout, InputBuffer, ReinterpretView, StorageBox
from torch._inductor.utils import IndentedBuffer, fresh_inductor_cache
from torch._inductor.virtualized import V

from mmqc.lowering import inductor
from mmqc.lowering.inductor import _described
from mmqc.lowering.kernel_names import kernel_names

DEVICE = torch.device("cpu")


def layout(dtype: torch.dtype, size: list[int], offset: int = 0) -> FixedLayout:
    strides = [int(torch.Size(size[i + 1 :]).numel()) for i in range(len(size))]
    return FixedLayout(DEVICE, dtype, list(map(Integer, size)), list(map(Integer, strides)), Integer(offset))


def view(dtype: torch.dtype, size: list[int], offset: int = 0) -> ReinterpretView:
    """Of 1 x 6 x 32 int8."""
    base = StorageBox(InputBuffer(name="x", layout=layout(torch.int8, [1, 6, 32])))
    return ReinterpretView(data=base, layout=layout(dtype, size, offset))


def graph(cpp_wrapper: bool) -> GraphLowering:
    nothing = fx.Graph()
    nothing.output(())
    lowering = GraphLowering(fx.GraphModule({}, nothing), cpp_wrapper=cpp_wrapper)
    lowering.graph_inputs["x"] = view(torch.int8, [6, 32])  # type: ignore[assignment]
    return lowering


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_described__a_whole_buffer_goes_by_its_name_in_cpp(dtype: torch.dtype) -> None:
    with V.set_graph_handler(graph(cpp_wrapper=True)):
        given = view(dtype, [6, 32])
        found = _described(given)
        assert found.codegen_reference() == "x"
        assert (found.get_size(), found.get_dtype()) == ([6, 32], dtype)
        assert _described(given) is found  # one descriptor for all who read it


@pytest.mark.parametrize(("size", "offset"), [([3, 32], 0), ([5, 32], 32)])
def test_described__a_part_of_a_buffer_is_copied_for_cpp(size: list[int], offset: int) -> None:
    lowering = graph(cpp_wrapper=True)
    with V.set_graph_handler(lowering):
        found = _described(view(torch.int8, size, offset))
        assert found.get_name() in {buffer.get_name() for buffer in lowering.buffers}
        assert found.codegen_reference() == found.get_name() != "x"
        assert found.get_size() == size


def test_described__python_gets_the_view_itself() -> None:
    with V.set_graph_handler(graph(cpp_wrapper=False)):
        given = view(torch.int8, [3, 32], 64)
        assert _described(given) is given


def test_indent__a_launch_stands_below_its_condition() -> None:
    code = IndentedBuffer()
    for line in (inductor._Indent("if min(1, rows):", 1), "kernel.run()", inductor._Indent("", -1), "return y"):
        line.codegen(code) if isinstance(line, inductor._Indent) else code.writeline(line)
    assert code.getvalue().splitlines() == ["if min(1, rows):", "    kernel.run()", "return y"]
    assert kernel_names("    if rows:\n        scaled_matmul_kernel_3.run(x)\n") == ["mmqc scaled_matmul_kernel"]


@torch.no_grad()
def test_indent__in_the_wrapper_that_inductor_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launch under a condition, in a graph for any number of rows: the product is computed for more than two of them."""
    write = ExternKernelOut.codegen
    rows: list[object] = []

    def guarded(kernel: ExternKernelOut, wrapper: Any) -> None:
        rows.append(kernel.get_size()[0])
        wrapper.writeline(inductor._Indent(f"if {wrapper.codegen_python_sizevar(Min(1, Max(0, kernel.get_size()[0] - 2)))}:", 1))
        write(kernel, wrapper)
        wrapper.writeline(inductor._Indent("", -1))

    monkeypatch.setattr(ExternKernelOut, "codegen", guarded)
    torch._dynamo.reset()
    w = torch.randn(4, 4)
    with fresh_inductor_cache():
        compiled = torch.compile(lambda x: torch.relu((x + 1) @ w) + 1, backend="inductor", dynamic=True)
        for m in (5, 3):
            x = torch.randn(m, 4)
            assert_close(compiled(x), torch.relu((x + 1) @ w) + 1)
    assert len(rows) == 1
    assert not isinstance(rows[0], int | Integer)
