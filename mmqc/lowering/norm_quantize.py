"""norm_quantize: on CUDA one kernel; elsewhere, and for few rows, its parts, before anything is lowered.

q, h = quantize(norm(x + r), s), x + r        ops/norm_quantize.py

As parts, Inductor makes one reduction of the norm and what is around it: of many rows that took 12.9 us where the kernel's bytes
take 6 (917 x 3584), of a few it costs a launch as the kernel does, and saves those of its neighbours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmqc import kernels
from mmqc.lowering.hadamard import on_cuda
from mmqc.lowering.inductor import TensorBox, empty, register_decomposition, register_lowering
from mmqc.ops.norm_quantize import normed
from mmqc.ops.quantize import code_dtype

OP = torch.ops.mmqc.norm_quantize.default
INDUCTOR_ROWS = 16  # so many rows and fewer are Inductor's, in a graph: eager calls take the kernel for any number


def takes_kernel(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, center: bool, round_first: bool, bits: int, code: torch.dtype
) -> bool:
    """Whether the CUDA kernel takes these traced operands, and is the faster way."""
    if x.device.type != "cuda" or not kernels.install():
        return False
    rows = math.prod(x.shape[:-1])
    if isinstance(rows, int) and rows <= INDUCTOR_ROWS:
        return False
    from mmqc.kernels.rows.norm_quantize import Norm, why_not  # imports Triton

    norm = Norm(0.0, gain, bias, None, round_first, center)  # residuals are made to fit
    return why_not(on_cuda().row_of(x), norm, bits, code) is None


@register_decomposition(OP)
def decompose(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    round_first: bool,
    scale: Tensor,
    visual: Tensor | None,
    bits: int,
    code: torch.dtype | None = None,
) -> Any:
    """The parts, as in the graph before fuse_norm_quantize."""
    if takes_kernel(x, gain, bias, center, round_first, bits, code_dtype(bits, code)):
        return NotImplemented
    h = x if residual is None else x + residual
    q = torch.ops.mmqc.quantize(normed(h, gain, bias, eps, round_first, center), scale, visual, bits, code)
    return q, x.new_empty(0) if residual is None else h


@register_lowering(OP, type_promotion_kind=None)
def lower_norm_quantize(
    x: TensorBox,
    residual: TensorBox | None,
    gain: TensorBox | None,
    bias: TensorBox | None,
    eps: float,
    center: bool,
    round_first: bool,
    scale: TensorBox,
    visual: TensorBox | None,
    bits: int,
    code: torch.dtype | None = None,
) -> tuple[TensorBox, TensorBox]:
    """The kernel's launch."""
    kind = code_dtype(bits, code)
    q, h = on_cuda().norm(x, residual, gain, bias, eps, center, round_first, scale, visual, bits, kind)
    return q, empty([0], x.get_dtype(), x.get_device_or_error()) if h is None else h
