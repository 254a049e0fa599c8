"""The linear in two precisions on CUDA as launches in the generated code: packed weights are written out once a call.

Shapes:  those of ops/mixed_matmul.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.kernels.matmul import mixed_matmul as kernel
from mmqc.kernels.matmul import packed_matmul as in_registers
from mmqc.kernels.matmul import unpack_weight
from mmqc.kernels.shared.device_facts import has_tensor_descriptors
from mmqc.kernels.shared.row_scale import Rows
from mmqc.lowering.inductor import TensorBox, lowerings, size_hint, static_int
from mmqc.lowering.launch import MANY, Operand, emit, is_gluon_tile

aten = torch.ops.aten
ALIGN = 16  # bytes: of rows and addresses that TMA takes


def why_not(widths: Sequence[int], out_dtype: torch.dtype, device: torch.device) -> str | None:
    """None, or why the kernel cannot take parts of these widths."""
    if len(widths) > 2:
        return f"{len(widths)} parts: the kernel has two"
    if sum(widths) > kernel.MAX_K[len(widths)]:
        return f"{sum(widths)} channels in {len(widths)} parts: sums may not fit int32"
    if out_dtype not in kernel.OUT_DTYPES:
        return f"results in {out_dtype} are computed in float64"
    if not has_tensor_descriptors(device):
        return "no tensor descriptors before compute capability 9.0"
    if any(width % ALIGN for width in widths):
        return f"tensor descriptors need parts of multiples of {ALIGN} channels, not {list(widths)}"
    return None


def in_one_matrix(weight_bits: Sequence[int]) -> bool:
    """Whether a weight in two parts is written out as one matrix (``Weight.joined``)."""
    return list(weight_bits) == [4, 8]


def by_call(x_q: TensorBox, w_scale: TensorBox, widths: Sequence[int], weight_bits: Sequence[int], out_dtype: torch.dtype) -> bool:
    """Whether the op itself is called: a tile of a warp-specialised kernel, which no launch in generated code has."""
    n, one = static_int(w_scale.get_size()[0]), len(widths) == 1
    if not one and not in_one_matrix(weight_bits):
        return False
    ops = [kernel.PINGPONG[len(widths)]]
    if weight_bits[0] == 4 and in_registers.fits(widths[0]):
        ops.append(in_registers.OP if one else in_registers.MIXED)
    return any(is_gluon_tile(x_q, n, op, out_dtype) for op in ops)


def mixed(
    x_q: TensorBox,
    x_scale: TensorBox,
    x_offset: TensorBox,
    w_q: Sequence[TensorBox],
    w_scale: TensorBox,
    w_sum: TensorBox,
    bias: TensorBox | None,
    widths: Sequence[int],
    weight_bits: Sequence[int],
    out_dtype: torch.dtype,
) -> TensorBox:
    """``mixed_matmul``, for which ``why_not`` found nothing."""
    rows, x = list(x_q.get_size()[:-1]), Operand.matrix(x_q)
    m = x.shape[0]
    planned = m if isinstance(m, int) else size_hint(m, MANY)
    ws: list[Any] = [Operand(w) for w in w_q]
    joined = in_one_matrix(weight_bits)
    for i, (w, width, bits) in enumerate(zip(ws, widths, weight_bits, strict=True)):
        if bits == 4 and not joined:
            ws[i] = Operand.new((w.shape[0], width), torch.int8, w.device)
            emit(unpack_weight.launch(w, ws[i], 4), m, planned)
    if joined:
        low, high = ws
        both: Any = Operand.new((low.shape[0], kernel.second_at(widths[0]) + widths[1]), torch.int8, low.device)
        columns: Any = Operand.new((4, low.shape[0]), torch.float32, low.device)
        scale, sums = Operand(w_scale), Operand(w_sum)
        emit(unpack_weight.join_launch(low, high, scale, sums, both, columns, widths[0]), m, planned)  # type: ignore[arg-type]
        ws = [both]
    y: Any = Operand.new((m, ws[0].shape[0]), out_dtype, ws[0].device)
    given: Any = Rows(x.of(planned), Operand.matrix(x_scale), Operand.matrix(x_offset))  # type: ignore[arg-type]
    second = ws[1] if len(ws) == 2 else None
    first = widths[0] if joined else 0
    weights: Any = kernel.Weight(ws[0], second, Operand(w_scale), Operand(w_sum), first)  # type: ignore[arg-type]
    b: Any = None if bias is None else Operand(bias)
    emit(kernel.launch(given, weights, b, y), m, planned)
    return lowerings[aten.view.default](y.box, [*rows, y.shape[1]])
