"""mixed_matmul on CUDA as launches in the generated code: packed weights written out once a call, then the kernel.

Shapes:  those of ops/mixed_matmul.py; the parts of x_q become matrices of their own, which TMA can address
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mmqc.kernels import mixed_matmul as kernel
from mmqc.kernels import unpack_weight
from mmqc.kernels.device_facts import has_tensor_descriptors
from mmqc.kernels.quantize_per_token import Parts
from mmqc.lowering.inductor import TensorBox, lowerings, size_hint
from mmqc.lowering.launch import MANY, Operand, emit

aten = torch.ops.aten
ALIGN = 16  # bytes: of rows and addresses that TMA takes


def why_not(widths: Sequence[int], out_dtype: torch.dtype, device: torch.device) -> str | None:
    """None, or why the kernel cannot take parts of these widths."""
    if len(widths) > 2:
        return f"{len(widths)} parts: the kernel has two"
    if out_dtype not in kernel.OUT_DTYPES:
        return f"results in {out_dtype} are computed in float64"
    if not has_tensor_descriptors(device):
        return "no tensor descriptors before compute capability 9.0"
    if any(width % ALIGN for width in widths):
        return f"tensor descriptors need parts of multiples of {ALIGN} channels, not {list(widths)}"
    return None


def mixed(
    x_q: TensorBox, x_scale: TensorBox, x_offset: TensorBox, w_q: Sequence[TensorBox], w_scale: TensorBox, w_sum: TensorBox,
    bias: TensorBox | None, widths: Sequence[int], weight_bits: Sequence[int], out_dtype: torch.dtype,
) -> TensorBox:  # fmt: skip
    """``mixed_matmul``, for which ``why_not`` found nothing."""
    rows, axis = list(x_q.get_size()[:-1]), len(x_q.get_size()) - 1
    m: Any = math.prod(rows)
    planned = m if isinstance(m, int) else size_hint(m, MANY)
    xs, ws, start = [], [], 0
    for w, width, bits in zip(w_q, widths, weight_bits, strict=True):
        part = Operand.matrix(lowerings[aten.slice.Tensor](x_q, axis, start, start + width))
        start += width
        weight: Any = Operand(w)
        if bits == 4:
            out: Any = Operand.new((weight.shape[0], width), torch.int8, weight.device)
            emit(unpack_weight.launch(weight, out, 4), m, planned)
            weight = out
        m = part.shape[0]
        xs.append(part.of(planned))
        ws.append(weight)
    s, o = Operand.matrix(x_scale), Operand.matrix(x_offset)
    y: Any = Operand.new((m, ws[0].shape[0]), out_dtype, ws[0].device)
    both = len(xs) == 2
    x: Any = Parts(xs[0], xs[1] if both else None, s, o)  # type: ignore[arg-type]
    weights: Any = kernel.Weight(ws[0], ws[1] if both else None, Operand(w_scale), Operand(w_sum))  # type: ignore[arg-type]
    b: Any = None if bias is None else Operand(bias)
    emit(kernel.launch(x, weights, b, y), m, planned)
    return lowerings[aten.view.default](y.box, [*rows, y.shape[1]])
