"""scaled_matmul_epilogue: on CUDA one kernel, or two behind one another; elsewhere its parts, before anything is lowered.

y = quantize(f(z_0) ∘ z_1, s_next)        ops/scaled_matmul_epilogue.py

With a gate and many rows on Hopper the op is called, and multiplies twice; or, of weights that stay packed, it is its parts.  As
parts, Inductor fuses what is between the linears.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmqc import kernels
from mmqc.lowering.inductor import TensorBox, call_kernel, register_decomposition, register_lowering
from mmqc.lowering.scaled_matmul import on_cuda
from mmqc.ops.scaled_matmul_epilogue import activated

OP = torch.ops.mmqc.scaled_matmul_epilogue.default


def takes_kernel(
    x_q: Tensor, w_q: list[Tensor], w_scale: list[Tensor], bias: list[Tensor | None], weight_bits: int, out_dtype: torch.dtype
) -> bool:
    """Whether the CUDA kernel takes these traced operands; what it does not take is reported of the parts."""
    if x_q.device.type != "cuda" or not kernels.install():
        return False
    from mmqc.kernels.on_cuda import why_not_epilogue

    return why_not_epilogue(x_q, w_q, w_scale, bias, weight_bits, out_dtype) is None


def better_apart(x_q: Tensor, w_q: list[Tensor], w_scale: list[Tensor], out_dtype: torch.dtype) -> bool:
    """Whether these traced operands are faster as parts."""
    from mmqc.kernels.matmul.linears import Linear
    from mmqc.kernels.matmul.scaled_matmul_epilogue import are_better_apart
    from mmqc.kernels.shared.launch import Shape

    m, k = math.prod(x_q.shape[:-1]), x_q.shape[-1]
    if not all(isinstance(size, int) for size in (m, k, *(w.shape[0] for w in w_q))):
        return False  # a tile is tuned for sizes that are known; of rows that come a call knows (by_rows.py)
    x: Any = Shape((m, k), x_q.dtype, x_q.device)
    linears = []
    for w, s in zip(w_q, w_scale, strict=True):
        weight, scale = (Shape(tuple(t.shape), t.dtype, t.device) for t in (w, s))
        linears.append(Linear(weight, scale, None, Shape((m, w.shape[0]), out_dtype, w.device)))  # type: ignore[arg-type]
    return are_better_apart(x, linears)


@register_decomposition(OP)
def decompose(
    x_q: Tensor,
    w_q: list[Tensor],
    x_scale: Tensor,
    w_scale: list[Tensor],
    bias: list[Tensor | None],
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    activation: str,
    next_scale: Tensor | None = None,
    next_visual: Tensor | None = None,
    next_bits: int = 8,
    low_x: Tensor | None = None,
    low_w: Tensor | None = None,
) -> Any:
    """The parts, as in the graph before fuse_epilogues."""
    by_kernel = takes_kernel(x_q, w_q, w_scale, bias, weight_bits, out_dtype)
    if by_kernel and not better_apart(x_q, w_q, w_scale, out_dtype):
        return NotImplemented
    ops = torch.ops.mmqc
    if by_kernel:  # few rows of both are one launch
        z = ops.scaled_matmuls(x_q, w_q, x_scale, w_scale, bias, visual, weight_bits, out_dtype)
    else:
        own = zip(w_q, w_scale, bias, strict=True)
        z = [ops.scaled_matmul(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype) for w, s, b in own]
    h = activated(z, activation, low_x, low_w)
    return h if next_scale is None else ops.quantize(h, next_scale, next_visual, next_bits)


@register_lowering(OP, type_promotion_kind=None)
def lower_scaled_matmul_epilogue(
    x_q: TensorBox,
    w_q: list[TensorBox],
    x_scale: TensorBox,
    w_scale: list[TensorBox],
    bias: list[TensorBox | None],
    visual: TensorBox | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    activation: str,
    next_scale: TensorBox | None = None,
    next_visual: TensorBox | None = None,
    next_bits: int = 8,
    low_x: TensorBox | None = None,
    low_w: TensorBox | None = None,
) -> TensorBox:
    """The kernel's launches, or a call."""
    given, last = (x_q, w_q, x_scale, w_scale, bias, visual), (next_scale, next_visual, next_bits, low_x, low_w)
    if on_cuda().epilogue_is_called(x_q, w_q, w_scale, bias, out_dtype, next_scale):
        return call_kernel(OP, *given, weight_bits, out_dtype, activation, *last)
    return on_cuda().with_epilogue(*given, out_dtype, activation, *last)
