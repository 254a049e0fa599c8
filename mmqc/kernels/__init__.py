"""Triton kernels, one op a file, with launchers: Ampere and newer, and Triton's interpreter on CPU tensors.

Each file holds the formula, ``supports`` (None, or why it cannot run), tile functions, the kernel and its launcher.
Importing this package alone does not import Triton; its modules do.  ``install`` makes the ops use them on CUDA.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import _disable_current_modes


@functools.cache
def install() -> bool:
    """Register the kernels as the ops' implementation on CUDA, if there is such a device and Triton; whether there is."""
    there = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if there and torch.version.hip is None:
        importlib.import_module("mmqc.kernels.on_cuda")
        importlib.import_module("mmqc.kernels.kv_on_cuda")
    return there and torch.version.hip is None


def prepare(device: torch.device, hadamards: Iterable[tuple[int, torch.dtype]] = ()) -> None:
    """Allocate on a CUDA device what kernels keep between launches: counters, and the matrices of these transforms.

    Before anything runs: memory of a CUDA graph's pool must not stay.
    """
    importlib.import_module("mmqc.kernels.split_k").prepare(device)
    plans = importlib.import_module("mmqc.kernels.hadamard_plan")
    with _disable_current_modes():
        for width, dtype in hadamards:
            if plans.why_no_tiling(width) is None:
                plans.hadamard_plan(width, device, dtype)
