"""Triton kernels, one op a file, with launchers: Ampere and newer, and Triton's interpreter on CPU tensors.

Each file holds the formula, tile functions, the kernel, why it cannot take some operands, and which launches others become.
Importing this package alone does not import Triton, its modules do, but says which assembler Triton is to use, before anything
is compiled.  ``install`` makes the ops use them on CUDA; the first call of an op there does it, too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from mmqc.kernels.assembler import name_assembler

name_assembler()


@functools.cache
def install() -> bool:
    """Register the kernels as the ops' implementation on CUDA, if there is such a device and Triton; whether there is."""
    there = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if there and torch.version.hip is None:
        importlib.import_module("mmqc.kernels.on_cuda")
        importlib.import_module("mmqc.kernels.kv_on_cuda")
        importlib.import_module("mmqc.kernels.mixed_on_cuda")
        importlib.import_module("mmqc.kernels.rows_on_cuda")
    return there and torch.version.hip is None
