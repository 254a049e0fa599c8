"""Arrays of sizes in C++ wrappers: whoever reads one finds it declared in front."""

from itertools import count
from types import SimpleNamespace
from typing import Any

from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.utils import IndentedBuffer

from mmqc.lowering.cpp_arrays import declared_arrays


def wrapper() -> Any:
    """What of a wrapper writes arrays."""
    made = SimpleNamespace(int_array_id=count(), declared_int_array_vars=set(), codegen_int_array_var_cache={})
    made._int_array_writeline_targets = []  # torch 2.15's
    made._codegen_int_array_var_impl = lambda *words: CppWrapperCpu._codegen_int_array_var_impl(made, *words)
    return made


def test_declared_arrays__by_whoever_asks_though_others_are_gone() -> None:
    of = wrapper()
    for _ in range(300):  # a buffer that nobody keeps gives its address to the next one
        lines = IndentedBuffer()
        with declared_arrays():
            name = CppWrapperCpu.codegen_int_array_var(of, "{16L, 32L}", lines.writeline, True)
        assert f"{name}[] = {{16L, 32L}};" in lines.getvalue()


def test_declared_arrays__once_by_each() -> None:
    of, first, second = wrapper(), IndentedBuffer(), IndentedBuffer()
    with declared_arrays():
        names = [CppWrapperCpu.codegen_int_array_var(of, "{4L}", b.writeline, True) for b in (first, second, first, second)]
    assert names == [names[0], names[1]] * 2
    assert names[0] != names[1]
    assert [b.getvalue().count("{4L}") for b in (first, second)] == [1, 1]
