"""Tensor descriptors in C++ wrappers: what they are made of, and sizes that are C++."""

from types import SimpleNamespace

import pytest
import torch
from sympy import Integer, Symbol
from torch import fx
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import FixedLayout, InputBuffer, ReinterpretView, StorageBox
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from mmqc.lowering.cpp_descriptors import described, descriptors_in_cpp

DEVICE = torch.device("cpu")
PATCHES = Symbol("s0", integer=True, positive=True)


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
        found = described(given)
        assert found.codegen_reference() == "x"
        assert (found.get_size(), found.get_dtype()) == ([6, 32], dtype)
        assert described(given) is found  # one descriptor for all who read it


@pytest.mark.parametrize(("size", "offset"), [([3, 32], 0), ([5, 32], 32)])
def test_described__a_part_of_a_buffer_is_copied_for_cpp(size: list[int], offset: int) -> None:
    lowering = graph(cpp_wrapper=True)
    with V.set_graph_handler(lowering):
        found = described(view(torch.int8, size, offset))
        assert found.get_name() in {buffer.get_name() for buffer in lowering.buffers}
        assert found.codegen_reference() == found.get_name() != "x"
        assert found.get_size() == size


def test_described__python_gets_the_view_itself() -> None:
    with V.set_graph_handler(graph(cpp_wrapper=False)):
        given = view(torch.int8, [3, 32], 64)
        assert described(given) is given


def lines_of(size: list[object], stride: list[object]) -> list[str]:
    """What a wrapper in C++ has for a descriptor of a tensor like that."""
    lines: list[str] = []
    tensor = SimpleNamespace(get_size=lambda: size, get_stride=lambda: stride, get_dtype=lambda: torch.int8)
    wrapper = SimpleNamespace(writeline=lines.append, val_to_arg_str=str, generate_args_decl=lambda **_: "&var_0")
    descriptor = SimpleNamespace(name="buf0", tensor=tensor, block_shape=[64, 128])
    with descriptors_in_cpp():
        CppWrapperGpu._generate_stable_tma_descriptor(wrapper, descriptor)  # type: ignore[arg-type]
    return lines


def test_descriptors_in_cpp__a_quotient_of_a_size() -> None:
    lines = lines_of([FloorDiv(PATCHES, Integer(4)), Integer(1024)], [Integer(1024), Integer(1)])
    assert not any("//" in line for line in lines)
    (rows,) = (line for line in lines if line.startswith("buf0.global_shape[0] = "))
    assert "div_floor_integer" in rows
    assert "s0" in rows
    assert {"buf0.global_shape[1] = 1024;", "buf0.strides[0] = 1024;"} <= set(lines)


def test_descriptors_in_cpp__what_is_a_name_or_a_number_stays() -> None:
    lines = lines_of([PATCHES, Integer(64)], [Integer(64), Integer(1)])
    assert {"buf0.block_shape[0] = 64;", "buf0.global_shape[0] = s0;", "buf0.strides[1] = 1;"} <= set(lines)
