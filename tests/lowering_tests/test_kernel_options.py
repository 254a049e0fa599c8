"""Kernels with their warps and stages."""

import pytest

from mmqc.lowering.kernel_options import with_options


def test_with_options__kernels_that_differ_in_them_are_of_different_functions():
    """Inductor's key of a kernel is the function's id, its constants and its signature."""
    kernel = pytest.importorskip("mmqc.kernels.kv.decode_attention").decode_attention_kernel
    if not hasattr(kernel, "src"):
        pytest.skip("the interpreter's kernels have no source")
    two, four = with_options(kernel, 2, 3), with_options(kernel, 4, 3)
    assert [tuned.configs[0].num_warps for tuned in (two, four)] == [2, 4]
    assert len({id(tuned.fn.fn) for tuned in (two, four)} | {id(kernel.fn)}) == 3
    assert two.fn.src == four.fn.src == kernel.src
    assert with_options(kernel, 2, 3) is two
