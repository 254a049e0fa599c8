"""The ops on CUDA as launches in the generated code: those of the kernels' plans, for each regime of rows.

    scaled            scaled_matmul(s)
    with_epilogue     scaled_matmul_epilogue
    weight_only       weight_only_matmul(s)

Where a plan has kernels in Gluon, which generated code cannot launch, the op is called: ``scaled_is_called`` and its like; where
the number of rows is not known, a function that chooses by it when it is (by_rows.py).
Each returns None where no kernel takes the operands: then the op is lowered as on any device, and ``why_not`` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmqc.kernels.matmul import group_scaled_matmul as group_kernel
from mmqc.kernels.matmul import scaled_matmul_epilogue as epilogue_kernel
from mmqc.kernels.matmul import weight_only_matmul as weight_only_kernel
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.unpack_weight import unpack_launch
from mmqc.kernels.shared.launch import Shape
from mmqc.kernels.shared.row_scale import ONE, VISUAL, RowScale
from mmqc.lowering import by_rows
from mmqc.lowering.inductor import TensorBox, convert, lowerings
from mmqc.lowering.launch import Operand, emit, emit_all, matmul_caller, of_any_rows, regimes, rows_of, shape_of, workspace

aten = torch.ops.aten


def _linears(
    m: Any,
    w_q: Sequence[TensorBox],
    w_scale: Sequence[TensorBox],
    bias: Sequence[TensorBox | None],
    dtype: torch.dtype,
    group_scale: Sequence[TensorBox] | None = None,
    *,
    operand: Callable[[TensorBox], Any] = Operand,
    new: Callable[..., Any] = Operand.new,
) -> list[Any]:
    """Operands of every linear, and memory for its y [M, N]."""
    parts = []
    for w, s, b, t in zip(w_q, w_scale, bias, group_scale or [None] * len(w_q), strict=True):
        weight = operand(w)
        y = new((m, weight.shape[0]), dtype, weight.device)
        parts.append(Linear(weight, operand(s), None if b is None else operand(b), y, None if t is None else operand(t)))
    return parts


_shapes = functools.partial(_linears, operand=shape_of, new=Shape)  # for a plan alone


def _shaped(linears: Sequence[Any], rows: Sequence[Any]) -> list[TensorBox]:
    """Every y in the shape that the op returns."""
    return [lowerings[aten.view.default](linear.y.box, [*rows, linear.y.shape[1]]) for linear in linears]


def row_scale(scale: TensorBox, visual: TensorBox | None, rows: Sequence[Any]) -> RowScale:
    """The static scale of each of these rows."""
    s: Any = Operand(convert(scale, torch.float32))
    if visual is None:
        return RowScale(ONE.value, s, s)
    mask = Operand.vector(lowerings[aten.expand.default](visual, list(rows)))
    return RowScale(VISUAL.value, s, mask)  # type: ignore[arg-type]


def scaled_is_called(
    x_q: TensorBox,
    w_q: Sequence[TensorBox],
    w_scale: Sequence[TensorBox],
    bias: Sequence[TensorBox | None],
    out_dtype: torch.dtype,
    group_scale: Sequence[TensorBox] | None = None,
    group_size: int = 0,
) -> bool:
    """Whether ``scaled_matmuls`` itself is called."""
    x = rows_of(x_q)
    caller = matmul_caller(x.shape[0])
    linears = _shapes(x.shape[0], w_q, w_scale, bias, out_dtype, group_scale) if caller.gluon else []
    return caller.gluon and any(product.is_gluon for product in group_kernel.plan(x, linears, group_size, caller))


def scaled(
    x_q: TensorBox,
    w_q: Sequence[TensorBox],
    x_scale: TensorBox,
    w_scale: Sequence[TensorBox],
    bias: Sequence[TensorBox | None],
    visual: TensorBox | None,
    out_dtype: torch.dtype,
    group_scale: Sequence[TensorBox] | None = None,
    group_size: int = 0,
) -> list[TensorBox]:
    """``scaled_matmuls``."""
    rows = list(x_q.get_size()[:-1])
    x = Operand.matrix(x_q)
    m = x.shape[0]
    linears = _linears(m, w_q, w_scale, bias, out_dtype, group_scale)
    scales: Any = row_scale(x_scale, visual, rows)
    up_to = by_rows.bound(x, linears, group_size)
    for planned, runs in regimes(m, up_to):
        given: Any = x.of(planned)
        products = of_any_rows(group_kernel.plan(given, linears, group_size, matmul_caller(m, runs)), m, planned, up_to)
        work: Any = workspace
        launches = group_kernel.launches(given, linears, scales, group_size, products, new=Operand.new, work=work)
        emit_all(launches, m, planned, runs)
    if up_to is not None:
        by_rows.scaled(x, linears, scales, visual if visual is None else scales.rows, up_to, group_size)
    return _shaped(linears, rows)


def epilogue_is_called(
    x_q: TensorBox,
    w_q: Sequence[TensorBox],
    w_scale: Sequence[TensorBox],
    bias: Sequence[TensorBox | None],
    out_dtype: torch.dtype,
    next_scale: TensorBox | None,
) -> bool:
    """Whether ``scaled_matmul_epilogue`` itself is called."""
    x = rows_of(x_q)
    caller = matmul_caller(x.shape[0])
    if not caller.gluon:
        return False
    linears = _shapes(x.shape[0], w_q, w_scale, bias, out_dtype if next_scale is None else torch.int8)
    return any(product.is_gluon for product in epilogue_kernel.plan(x, linears, out_dtype, caller))


def with_epilogue(
    x_q: TensorBox,
    w_q: Sequence[TensorBox],
    x_scale: TensorBox,
    w_scale: Sequence[TensorBox],
    bias: Sequence[TensorBox | None],
    visual: TensorBox | None,
    out_dtype: torch.dtype,
    activation: str,
    next_scale: TensorBox | None,
    next_visual: TensorBox | None,
    next_bits: int,
    low_x: TensorBox | None,
    low_w: TensorBox | None,
) -> TensorBox:
    """``scaled_matmul_epilogue``."""
    rows = list(x_q.get_size()[:-1])
    x = Operand.matrix(x_q)
    m, scales = x.shape[0], row_scale(x_scale, visual, rows)
    codes = None if next_scale is None else row_scale(next_scale, next_visual, rows)
    low = None if low_x is None or low_w is None else (Operand.matrix(low_x), Operand(low_w))
    epilogue = Epilogue(activation, out_dtype, codes, next_bits, low)
    first = Operand(w_q[0])
    y: Any = Operand.new((m, first.shape[0]), out_dtype if codes is None else torch.int8, x.device)
    linears: list[Any] = [
        Linear(Operand(w), Operand(s), None if b is None else Operand(b), y)  # type: ignore[arg-type]
        for w, s, b in zip(w_q, w_scale, bias, strict=True)
    ]
    up_to = by_rows.bound(x, linears)
    for planned, runs in regimes(m, up_to):
        given: Any = x.of(planned)
        products = of_any_rows(epilogue_kernel.plan(given, linears, out_dtype, matmul_caller(m, runs)), m, planned, up_to)
        launches = epilogue_kernel.launches(given, linears, scales, epilogue, products, new=Operand.new, work=workspace)  # type: ignore[arg-type]
        emit_all(launches, m, planned, runs)
    if up_to is not None:
        masks: Any = [None if mask is None else s.rows for mask, s in ((visual, scales), (next_visual, codes or scales))]
        by_rows.with_epilogue(x, linears, scales, masks[0], epilogue, masks[1], up_to)
    return lowerings[aten.view.default](y.box, [*rows, first.shape[0]])


def weight_only(
    x: TensorBox,
    w_q: Sequence[TensorBox],
    w_scale: Sequence[TensorBox],
    bias: Sequence[TensorBox | None],
    bits: int,
    group_size: int,
    zero: TensorBox | None = None,
) -> list[TensorBox]:
    """``weight_only_matmuls``, or, with ``zero``, one asymmetric linear."""
    rows, dtype = list(x.get_size()[:-1]), x.get_dtype()
    matrix = Operand.matrix(x)
    m = matrix.shape[0]
    zeros: Any = None if zero is None else Operand(zero)
    shapes = _shapes(m, w_q, w_scale, bias, dtype)
    called = by_rows.between(matrix, shapes, bits, zeros, group_size)
    planned = [(matrix.of(count), count, runs, matmul_caller(m, runs)) for count, runs in regimes(m)]
    given, _, _, caller = planned[0]
    if any(product.written_out for product in weight_only_kernel.plan(given, shapes, bits, caller)):
        ys = [_written_out(matrix, *parts, zeros, bits, group_size) for parts in zip(w_q, w_scale, bias, strict=True)]
        return [lowerings[aten.view.default](y, [*rows, y.get_size()[1]]) for y in ys]
    linears = _linears(m, w_q, w_scale, bias, dtype)
    for given, count, runs, caller in planned:
        if called is not None and called[0] < count <= called[1]:
            continue
        for product in of_any_rows(weight_only_kernel.plan(given, linears, bits, caller._replace(gluon=False)), m, count):
            some = [linears[i] for i in product.linears]
            launch = weight_only_kernel.launch(given, some, zeros, group_size, bits, product.tile, workspace)  # type: ignore[arg-type]
            emit(launch, m, count, runs)
    if called is not None:
        by_rows.weight_only(matrix, linears)
    return _shaped(linears, rows)


def _written_out(
    x: Operand, w_q: TensorBox, w_scale: TensorBox, bias: TensorBox | None, zero: Any, bits: int, group_size: int
) -> TensorBox:
    """X times the weight in x's dtype; Inductor picks the product and fuses what follows."""
    codes = Operand(w_q)
    w = Operand.new((codes.shape[0], x.shape[1]), x.dtype, x.device)
    scale = Operand(w_scale)
    emit(unpack_launch(codes, w, bits, scale, zero, group_size), x.shape[0], x.shape[0])  # type: ignore[arg-type]
    wt = lowerings[aten.permute.default](w.box, [1, 0])
    if bias is None:
        return lowerings[aten.mm.default](x.box, wt)
    return lowerings[aten.addmm.default](convert(bias, x.dtype), x.box, wt)
