"""Kernels with their warps and stages; and what is read in wrappers of kernels, for which Triton must not interpret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_source import compiled_kernels

from mmqc.lowering.kernel_options import with_options

HERE = Path(__file__).parent
READ = (f"{HERE}/test_decode_attention.py::test_decode_attention__a_launch_for_each_number_of_heads", __file__)


def test_with_options__kernels_that_differ_in_them_are_of_different_functions():
    """Inductor's key of a kernel is the function's id, its constants and its signature."""
    compiled_kernels()
    kernel = pytest.importorskip("mmqc.kernels.kv.decode_attention").decode_attention_kernel
    two, four = with_options(kernel, 2, 3), with_options(kernel, 4, 3)
    assert [tuned.configs[0].num_warps for tuned in (two, four)] == [2, 4]
    assert len({id(tuned.fn.fn) for tuned in (two, four)} | {id(kernel.fn)}) == 3
    assert two.fn.src == four.fn.src == kernel.src
    assert with_options(kernel, 2, 3) is two


@pytest.mark.slow
def test_wrappers__are_read_in_a_process_without_the_interpreter():
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("this process has none")
    changed = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *READ]
    done = subprocess.run(command, env={**os.environ, **changed}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed, 1 skipped" in done.stdout
