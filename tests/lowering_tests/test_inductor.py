"""What a tensor descriptor is made of, in wrappers of both languages; the launches themselves are in gpu_tests."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from sympy import Integer, Max, Min
from tolerance import assert_close
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.ir import ExternKernelOut
from torch._inductor.utils import IndentedBuffer, fresh_inductor_cache

from mmqc.lowering import inductor
from mmqc.lowering.kernel_names import kernel_names

DEVICE = torch.device("cpu")


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


def test_forget_traces__of_the_nodes_with_tiles() -> None:
    """Of a GPU's kernels: each node has its graph, and a graph that is exported has its weights."""

    class Node:
        def get_ranges(self) -> tuple[tuple[()], tuple[()]]:
            return (), ()

    node = Node()
    gone = weakref.ref(node)
    assert TritonScheduling.candidate_tilings(node, 1, 1) == []
    del node
    inductor.forget_traces()
    assert gone() is None


def test_import__without_assertions_needs_a_torch_that_has_none() -> None:
    """Under -O Inductor before 2.14 leaves out what it does in them, and its code is wrong."""
    program = "import mmqc; mmqc.recipes.mquant(4); import mmqc.lowering.inductor"
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=False)
    if torch.__version__ >= (2, 14):  # type: ignore[operator]
        assert not done.returncode, done.stderr
    else:
        assert re.search(r"ImportError: torch 2\.\d+.*wrong code under python -O", done.stderr), done.stderr
