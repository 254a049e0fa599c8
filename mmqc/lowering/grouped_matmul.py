"""grouped_matmul: on CUDA the Triton kernel; on the CPU loops over the stored weight, or the op itself.

    y[s, n] = sum over i, j, t of  x[s, k] (q[e, n, k] - z[e, n, k // g]) s[e, n, k // g]
    k = t L + i c + j, j < c (few_rows.py)
    e(s) = how many experts end at or before row s

Few rows (a decode step), and a package that runs without Python: one loop nest that reads of the stored weight what the rows'
experts have, and writes none of it.  Many rows: the op, which multiplies one expert after the other.
Exact:   codes, scales and sums in float32 (float64 for float64 rows), one rounding at the end; integers in int32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import Integer
from torch import fx

from mmqc import kernels
from mmqc.lowering import few_rows
from mmqc.lowering.inductor import (
    FloorDiv,
    Pointwise,
    TensorBox,
    call_kernel,
    convert,
    for_package,
    has_kernel,
    lowerings,
    ops,
    register_lowering,
    static_int,
    sums,
)
from mmqc.lowering.scaled_matmul import traced_operands
from mmqc.ops.pack import STRETCHES, stretch

aten = torch.ops.aten


def why_not(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel cannot take this node of an ATen graph."""
    values = traced_operands(node)
    if values[0].device.type != "cuda" or not kernels.install():
        return None
    from mmqc.kernels import on_cuda

    return on_cuda.why_not_grouped(*values)


@register_lowering(torch.ops.mmqc.grouped_matmul.default, type_promotion_kind=None)
def lower_grouped_matmul(
    x: TensorBox,
    w_q: TensorBox,
    w_scale: TensorBox,
    offsets: TensorBox,
    bias: TensorBox | None,
    row_scale: TensorBox | None,
    weight_bits: int,
    group_size: int,
    out_dtype: torch.dtype,
    w_zero: TensorBox | None = None,
) -> TensorBox:
    """A call of the op, or loops of its own."""
    if not for_package() and (has_kernel(x) or not few_rows.is_few(x.get_size()[0])):
        op = torch.ops.mmqc.grouped_matmul.default
        return call_kernel(op, x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, out_dtype, w_zero)
    rows, (experts, n) = x.get_size()[0], map(static_int, w_q.get_size()[:2])
    wide = torch.promote_types(out_dtype, torch.float32)
    expert = _experts(offsets, rows, experts)
    expert_of = expert.make_loader()

    def stack(row: Any) -> Any:
        last = ops.constant(experts - 1, torch.int64)  # a row of no expert reads the last one's weight and drops the sum
        return ops.indirect_indexing(ops.minimum(expert_of([row]), last), Integer(experts), check=False)

    scale = w_scale if group_size else None
    exact = row_scale is not None and not group_size
    total = _products(x, w_q, scale, w_zero, stack, weight_bits, group_size, torch.int32 if exact else wide)
    load, load_scale = total.make_loader(), w_scale.make_loader()
    load_row = None if row_scale is None else row_scale.make_loader()
    load_bias = None if bias is None else bias.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        row, column = index
        here, value = [stack(row), column], ops.to_dtype(load(index), wide)
        if load_row is not None:
            value = ops.mul(value, ops.to_dtype(load_row([row]), wide))
        if not group_size:
            value = ops.mul(value, ops.to_dtype(load_scale(here), wide))
        if load_bias is not None:
            value = ops.add(value, ops.to_dtype(load_bias(here), wide))
        there = ops.lt(expert_of([row]), ops.constant(experts, torch.int64))
        return ops.to_dtype(ops.where(there, value, ops.constant(0.0, wide)), out_dtype)

    return Pointwise.create(device=x.get_device_or_error(), dtype=out_dtype, inner_fn=inner, ranges=[rows, n])


def _experts(offsets: TensorBox, rows: Any, experts: int) -> TensorBox:
    """Int64 [S]: the expert of every row, E for rows of none."""
    load = offsets.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        row, e = index
        end = ops.to_dtype(load([e + 1]), torch.int64)
        return ops.to_dtype(ops.ge(ops.index_expr(row, torch.int64), end), torch.int64)

    past = Pointwise.create(device=offsets.get_device_or_error(), dtype=torch.int64, inner_fn=inner, ranges=[rows, experts])
    found = lowerings[aten.sum.dim_IntList](past, [1])
    found.realize()
    return found


def _products(
    x: TensorBox,
    w_q: TensorBox,
    scale: TensorBox | None,
    zero: TensorBox | None,
    stack: Callable[[Any], Any],
    weight_bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> TensorBox:
    """[S, N] sums in ``dtype`` of codes, less their zero points, or of these times their groups' scales."""
    rows, width, n = x.get_size()[0], static_int(x.get_size()[1]), static_int(w_q.get_size()[1])
    length, count = stretch(width, weight_bits), STRETCHES[weight_bits]
    chunk = few_rows.chunk_of(width, weight_bits, group_size)
    x = convert(x, dtype)
    if width < count * length:
        x = lowerings[aten.constant_pad_nd.default](x, [0, count * length - width], 0)
    x.realize()  # else what produced x is computed again for every output channel
    load_x, load_w = x.make_loader(), w_q.make_loader()
    load_scale, load_zero = (None if part is None else part.make_loader() for part in (scale, zero))

    def inner(index: Sequence[Any], reduced: Sequence[Any]) -> Any:
        (row, channel), (i, j) = index, reduced
        expert, total = stack(row), None
        load = lambda at: load_w([expert, *at])  # noqa: E731
        for t, value in enumerate(few_rows.codes(load, channel, i, j, chunk, weight_bits, length)):
            here: list[Any] = [expert, channel]
            if group_size:
                here.append(FloorDiv(t * (length // chunk) + i, Integer(group_size // chunk)))
            value = ops.to_dtype(value, dtype)
            if load_zero is not None:
                value = ops.sub(value, ops.to_dtype(load_zero(here), dtype))
            value = ops.mul(value, load_x([row, t * length + i * chunk + j]))
            if load_scale is not None:
                value = ops.mul(value, ops.to_dtype(load_scale(here), dtype))
            total = value if total is None else ops.add(total, value)
        return total

    return sums(x, dtype, inner, [rows, n], [length // chunk, chunk])
