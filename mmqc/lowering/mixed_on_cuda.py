"""The linear in two precisions on CUDA as launches in the generated code: packed weights are written out once a call.

Shapes:  those of ops/mixed_matmul.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.kernels.matmul import mixed_matmul as mixed_kernel
from mmqc.kernels.matmul.unpack_weight import unpack_launch
from mmqc.kernels.shared.launch import Shape
from mmqc.kernels.shared.row_scale import Rows
from mmqc.lowering.inductor import TensorBox, lowerings, size_hint, static_int
from mmqc.lowering.launch import MANY, Operand, count_rows, emit, emit_all, matmul_caller, workspace
from mmqc.ops.pack import packed_width

aten = torch.ops.aten


def _shapes(
    m: int, n: int, widths: Sequence[int], weight_bits: Sequence[int], out_dtype: torch.dtype, device: torch.device
) -> tuple[Any, Any, Any]:
    """x, the weight, whose second part is written out, and y, for a plan."""
    parts, both = len(widths), sum(widths)
    x: Any = Rows(Shape((m, both), torch.int8, device), *(Shape((m, parts), torch.float32, device) for _ in "so"))  # type: ignore[arg-type]
    packed = weight_bits[0] == 4
    low = Shape((n, packed_width(widths[0], 4) if packed else widths[0]), torch.uint8 if packed else torch.int8, device)
    high = Shape((n, widths[1]), torch.int8, device) if parts > 1 else None
    scale, sums = (Shape((n, parts), dtype, device) for dtype in (torch.float32, torch.int32))
    w: Any = mixed_kernel.Weight(low, high, scale, sums)  # type: ignore[arg-type]
    return x, w, Shape((m, n), out_dtype, device)


def why_not(n: int, widths: Sequence[int], weight_bits: Sequence[int], out_dtype: torch.dtype, device: torch.device) -> str | None:
    """None, or why the kernel cannot take parts of these widths."""
    if len(widths) > 2:
        return f"{len(widths)} parts: the kernel has two"
    x, w, y = _shapes(1, n, widths, weight_bits, out_dtype, device)
    return mixed_kernel.why_not(x, w, None, y)


def is_called(
    x_q: TensorBox, w_scale: TensorBox, widths: Sequence[int], weight_bits: Sequence[int], out_dtype: torch.dtype
) -> bool:
    """Whether the op itself is called: for kernels in Gluon, which generated code cannot launch."""
    m, n = count_rows(x_q), static_int(w_scale.get_size()[0])
    caller = matmul_caller(m)
    if not caller.gluon:
        return False
    x, w, y = _shapes(m, n, widths, weight_bits, out_dtype, x_q.get_device_or_error())
    return any(product.is_gluon for product in mixed_kernel.plan(x, w, y, caller))


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
    low, *rest = (Operand(w) for w in w_q)
    for high, width, bits in zip(rest, widths[1:], weight_bits[1:], strict=True):
        if bits == 4:
            rest = [Operand.new((high.shape[0], width), torch.int8, high.device)]
            emit(unpack_launch(high, rest[0], bits), m, planned)  # type: ignore[arg-type]
    w: Any = mixed_kernel.Weight(low, rest[0] if rest else None, Operand(w_scale), Operand(w_sum))  # type: ignore[arg-type]
    y: Any = Operand.new((m, low.shape[0]), out_dtype, low.device)
    given: Any = Rows(x.of(planned), Operand.matrix(x_scale).of(planned), Operand.matrix(x_offset).of(planned))  # type: ignore[arg-type]
    b: Any = None if bias is None else Operand(bias)
    for product in mixed_kernel.plan(given, w, y, matmul_caller(m)):
        emit_all(mixed_kernel.launches(given, w, b, y, product, new=Operand.new, work=workspace), m, planned)  # type: ignore[arg-type]
    return lowerings[aten.view.default](y.box, [*rows, y.shape[1]])
