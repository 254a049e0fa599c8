"""Inductor without its own code for what adds up, or approximates a function, in another way than torch's kernels.

    with torch_kernels():  compile          ->  those ops are calls of torch's kernels; what is entry by entry is still fused

Why:     a graph that rounds activations must round where the model does: a sum in another order moves a value across a tie now
         and then, its code is another one, and what stands behind it differs by a step.
Where:   what is compiled or packed for the CPU (docs/explanation/numerics.md has its cost).  On CUDA norms, activations and
         quantization are kernels of ours, or fused code whose time counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from mmqc.lowering import inductor

# Sums over an axis, and functions that torch's kernels approximate by other polynomials than generated code.
ORDERED = (
    "mean",
    "sum",
    "silu",
    "gelu",
    "sigmoid",
    "tanh",
    "softplus",
    "exp",
    "sin",
    "cos",
    "rsqrt",
    "_softmax",
    "native_layer_norm",
    "native_group_norm",
    "_fused_rms_norm",
)


@contextmanager
def torch_kernels() -> Iterator[None]:
    """Until the end of the block, calls of torch's kernels for ``ORDERED``."""
    aten: Any = torch.ops.aten
    ops = [
        getattr(packet, overload)
        for packet in (getattr(aten, name) for name in ORDERED if hasattr(aten, name))
        for overload in packet.overloads()
        if "out" not in overload
    ]
    plain = {op: inductor.fallback_handler(op, add_to_fallback_set=False) for op in ops}
    with mock.patch.dict(inductor.lowerings, plain), mock.patch.dict(inductor.decompositions):
        for op in ops:
            inductor.decompositions.pop(op, None)
        with inductor.decompositions_changed():
            yield
