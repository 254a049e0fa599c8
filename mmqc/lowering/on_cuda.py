"""The ops on CUDA as launches in the generated code: which kernels, for how many rows.

    scaled            scaled_matmul(s)        few rows, or several linears: one launch;  many: one a linear, by TMA where it can
    with_epilogue     scaled_matmul_epilogue  one launch, whatever the rows
    weight_only       weight_only_matmul(s)   the same from packed weights;  many rows: the weight written out once, then mm

On Hopper products of many rows, of a number that is known, are calls of the op: ``by_call``.
Each returns None where no kernel takes the operands: then the op is lowered as on any device, and ``why_not`` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.kernels.matmul import packed_matmul as in_registers
from mmqc.kernels.matmul import pingpong_matmul as pingpong
from mmqc.kernels.matmul import scaled_matmul as scaled_kernels
from mmqc.kernels.matmul import scaled_matmul_epilogue as epilogue_kernels
from mmqc.kernels.matmul import unpack_weight
from mmqc.kernels.matmul import weight_only_matmul as weight_only_kernels
from mmqc.kernels.matmul.configs import PERSISTENT, MatmulConfig, config
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.scaled_matmul import FEW_ROWS, Linear
from mmqc.kernels.shared.device_facts import has_tensor_descriptors
from mmqc.kernels.shared.row_scale import ONE, VISUAL, RowScale
from mmqc.lowering.inductor import TensorBox, convert, lowerings, static_int
from mmqc.lowering.launch import Operand, count_rows, emit, is_gluon_tile, regimes, workspace

aten = torch.ops.aten
WHOLE = MatmulConfig(128, 128, 64, 8, 3, variant="columns")  # any number of rows from packed weights, in one launch


def _linears(
    m: Any, w_q: Sequence[TensorBox], w_scale: Sequence[TensorBox], bias: Sequence[TensorBox | None], dtype: torch.dtype
) -> list[Any]:
    """Operands of every linear, and memory for its y [M, N]."""
    parts = []
    for w, s, b in zip(w_q, w_scale, bias, strict=True):
        weight = Operand(w)
        y = Operand.new((m, weight.shape[0]), dtype, weight.device)
        parts.append(Linear(weight, Operand(s), None if b is None else Operand(b), y))  # type: ignore[arg-type]
    return parts


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


def _one_launch(linears: Sequence[Any], m: int, c: MatmulConfig) -> bool:
    """Whether several linears share a launch."""
    return len(linears) > 1 and m <= FEW_ROWS and c.variant in ("rows", "columns") and scaled_kernels.alike(list(linears))


def by_call(x_q: TensorBox, w_q: Sequence[TensorBox], out_dtype: torch.dtype) -> bool:
    """Whether the op itself is called: for tiles of Gluon's kernels, which no launch in generated code has."""
    return all(_by_call(x_q, w, out_dtype) for w in w_q)


def _by_call(x_q: TensorBox, w_q: TensorBox, out_dtype: torch.dtype) -> bool:
    n, k = static_int(w_q.get_size()[0]), static_int(x_q.get_size()[-1])
    codes, op = (scaled_kernels.op_of(x_q.get_dtype(), t.get_dtype()) for t in (x_q, w_q))
    if op == "scaled_int4" and in_registers.fits(k) and is_gluon_tile(x_q, n, in_registers.OP, out_dtype):
        return True
    if not is_gluon_tile(x_q, n, pingpong.OPS[codes], out_dtype):
        return False
    given = count_rows(x_q), n, k, x_q.get_device_or_error()
    return op == codes or config(op, *given).variant == "unpack"  # packed ones are written out as codes, or are no codes


def scaled(
    x_q: TensorBox,
    w_q: Sequence[TensorBox],
    x_scale: TensorBox,
    w_scale: Sequence[TensorBox],
    bias: Sequence[TensorBox | None],
    visual: TensorBox | None,
    out_dtype: torch.dtype,
) -> list[TensorBox]:
    """``scaled_matmuls``."""
    rows = list(x_q.get_size()[:-1])
    x = Operand.matrix(x_q)
    m, k = x.shape
    linears = _linears(m, w_q, w_scale, bias, out_dtype)
    scales = row_scale(x_scale, visual, rows)
    op = scaled_kernels.op_name(x, linears[0].w)  # type: ignore[arg-type]
    width = sum(linear.w.shape[0] for linear in linears)
    for planned, runs in regimes(m):
        c = config(op, planned, width, k, x.device)
        if _one_launch(linears, planned, c):
            launch = scaled_kernels.pointer_launch(x.of(planned), linears, scales, None, c, work=workspace)  # type: ignore[arg-type]
            emit(launch, m, planned, runs)
            continue
        for linear in linears:
            c = config(op, planned, linear.w.shape[0], k, x.device)
            _scaled_one(x, linear, scales, c, planned, runs)
    return _shaped(linears, rows)


def _scaled_one(x: Operand, linear: Any, scales: RowScale, c: MatmulConfig, planned: int, runs: Any) -> None:
    (linear,), c = _written_as_codes(x, [linear], c, planned, runs)
    if _by_tma(x, linear) and c.variant in PERSISTENT:
        emit(scaled_kernels.descriptor_launch(x.of(planned), linear, scales, None, c), x.shape[0], planned, runs)  # type: ignore[arg-type]
        return
    c = c.with_stages(3) if c.variant in PERSISTENT else c
    launch = scaled_kernels.pointer_launch(x.of(planned), [linear], scales, None, c, work=workspace)  # type: ignore[arg-type]
    emit(launch, x.shape[0], planned, runs)


def _by_tma(x: Operand, linear: Any) -> bool:
    return has_tensor_descriptors(x.device) and x.shape[1] % 16 == 0 and linear.w.dtype != torch.uint8


def _written_as_codes(
    x: Operand, linears: Sequence[Any], c: MatmulConfig, planned: int, runs: Any
) -> tuple[list[Any], MatmulConfig]:
    """Where the tile is for weights that are unpacked once: the linears with such weights, and how they are multiplied."""
    if c.variant != "unpack":
        return list(linears), c
    if runs is not None:
        return list(linears), WHOLE  # the weight would be written out for calls that do not need it
    found = []
    for linear in linears:
        w: Any = Operand.new((linear.w.shape[0], x.shape[1]), x.dtype, x.device)
        emit(unpack_weight.launch(linear.w, w, 4), x.shape[0], planned)  # type: ignore[arg-type]
        found.append(linear._replace(w=w))
    op = scaled_kernels.op_name(x, found[0].w)  # type: ignore[arg-type]
    return found, config(op, planned, sum(linear.w.shape[0] for linear in found), x.shape[1], x.device)


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
    (m, k), scales = x.shape, row_scale(x_scale, visual, rows)
    codes = None if next_scale is None else row_scale(next_scale, next_visual, rows)
    low = None if low_x is None or low_w is None else (Operand.matrix(low_x), Operand(low_w))
    epilogue = Epilogue(activation, out_dtype, codes, next_bits, low)
    first = Operand(w_q[0])
    y: Any = Operand.new((m, first.shape[0]), out_dtype if codes is None else torch.int8, x.device)
    linears: list[Any] = [
        Linear(Operand(w), Operand(s), None if b is None else Operand(b), y)  # type: ignore[arg-type]
        for w, s, b in zip(w_q, w_scale, bias, strict=True)
    ]
    op = scaled_kernels.op_name(x, linears[0].w)  # type: ignore[arg-type]
    for planned, runs in regimes(m):
        c = config(op, planned, sum(linear.w.shape[0] for linear in linears), k, x.device)
        given, c = _written_as_codes(x, linears, c, planned, runs)
        launch = epilogue_kernels.launch(
            x.of(planned),
            given,
            scales,
            epilogue_kernels.overlapped(c),
            epilogue,  # type: ignore[arg-type]
            by_tma=_by_tma(x, given[0]),
            work=workspace,  # type: ignore[arg-type]
        )
        emit(launch, m, planned, runs)
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
    (m, k), op = matrix.shape, f"weight_int{bits}"
    zeros: Any = None if zero is None else Operand(zero)
    planned = list(regimes(m))
    if len(planned) == 1 and config(op, planned[0][0], int(w_q[0].get_size()[0]), k, matrix.device).variant == "unpack":
        ys = [_written_out(matrix, *parts, zeros, bits, group_size) for parts in zip(w_q, w_scale, bias, strict=True)]
        return [lowerings[aten.view.default](y, [*rows, y.get_size()[1]]) for y in ys]
    linears = _linears(m, w_q, w_scale, bias, dtype)
    width = sum(linear.w.shape[0] for linear in linears)
    for count, runs in planned:
        c = config(op, count, width, k, matrix.device)
        if c.variant == "unpack":
            c = config(op, 256, width, k, matrix.device)
            c = WHOLE if c.variant == "unpack" or c.split_k > 1 else c
        together = [linears] if _one_launch(linears, count, c) else [[linear] for linear in linears]
        for some in together:
            launch = weight_only_kernels.launch(matrix.of(count), some, zeros, group_size, bits, c, workspace)  # type: ignore[arg-type]
            emit(launch, m, count, runs)
    return _shaped(linears, rows)


def _written_out(
    x: Operand, w_q: TensorBox, w_scale: TensorBox, bias: TensorBox | None, zero: Any, bits: int, group_size: int
) -> TensorBox:
    """X times the weight in x's dtype; Inductor picks the product and fuses what follows."""
    codes = Operand(w_q)
    w = Operand.new((codes.shape[0], x.shape[1]), x.dtype, x.device)
    scale = Operand(w_scale)
    emit(unpack_weight.launch(codes, w, bits, scale, zero, group_size), x.shape[0], x.shape[0])  # type: ignore[arg-type]
    wt = lowerings[aten.permute.default](w.box, [1, 0])
    if bias is None:
        return lowerings[aten.mm.default](x.box, wt)
    return lowerings[aten.addmm.default](convert(bias, x.dtype), x.box, wt)
