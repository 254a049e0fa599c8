"""Linears of many rows, of a number that is known when they run: a call that chooses by it (kernels/matmul/by_rows.py).

bound(rows, device, gluon)   rows up to which a graph for any number has launches of its own; None: for all
scaled, with_epilogue        the call for more of them, and the kernels that it may want, compiled meanwhile
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sympy import Expr

from mmqc.kernels.matmul import by_rows
from mmqc.kernels.matmul import scaled_matmul as scaled_kernel
from mmqc.kernels.matmul import scaled_matmul_epilogue as epilogue_kernel
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, has_warpgroup_products
from mmqc.kernels.shared.launch import Shape
from mmqc.kernels.shared.row_scale import RowScale
from mmqc.lowering.inductor import at_most
from mmqc.lowering.launch import Operand, more_than
from mmqc.lowering.python_call import call, has_python


def bound(rows: Any, device: torch.device) -> int | None:
    """Rows up to which a graph has launches of its own; None where it has them for every number."""
    known = not isinstance(rows, Expr) or at_most(rows, WARPGROUP_ROWS)
    return None if known or not has_python() or not has_warpgroup_products(device) else WARPGROUP_ROWS


def scaled(x: Operand, linears: Sequence[Linear], scales: RowScale, mask: Operand | None) -> None:
    """``scaled_matmuls`` of more rows than ``bound``."""
    w, w_scale, bias, y = _parts(linears)
    args = (_site(x, linears, scales), x.box, _box(scales.scale), _box(mask), w, w_scale, bias, y)
    call(by_rows.scaled, args, y, more_than(x.shape[0], WARPGROUP_ROWS))
    _ahead(x, linears, scales, None, scaled_kernel.plan)


def with_epilogue(
    x: Operand, linears: Sequence[Linear], scales: RowScale, mask: Operand | None, epilogue: Epilogue, next_mask: Operand | None
) -> None:
    """``scaled_matmul_epilogue`` of more rows than ``bound``."""
    w, w_scale, bias, y = _parts(linears)
    codes, (low_x, low_w) = epilogue.next, epilogue.low or (None, None)
    next_kind, rank = None if codes is None else codes.kind, None if low_w is None else low_w.shape[1]
    after = f"{epilogue.activation}, {epilogue.dtype}, {next_kind}, {epilogue.bits}, {rank}"
    site = f"{_site(x, linears, scales)}, then {after}"
    last = (_box(None if codes is None else codes.scale), _box(next_mask), epilogue.bits, _box(low_x), _box(low_w))
    args = (site, x.box, _box(scales.scale), _box(mask), w, w_scale, bias, y[0], epilogue.activation, epilogue.dtype, *last)
    call(by_rows.with_epilogue, args, y[:1], more_than(x.shape[0], WARPGROUP_ROWS))
    if low_w is None:  # the term of low rank has the rows of x, which no sample has
        _ahead(x, linears, scales, epilogue, lambda a, b: epilogue_kernel.plan(a, b, epilogue.dtype))


def _ahead(x: Operand, linears: Sequence[Linear], scales: RowScale, epilogue: Epilogue | None, plan: Any) -> None:
    given, device = _shape(x), x.device
    some = [linear._replace(**{k: _shape(v) for k, v in linear._asdict().items() if v is not None}) for linear in linears]
    compile_ahead.ahead(by_rows.kernels_of(given, some, scales, epilogue, plan), device)


def _shape(operand: Any) -> Any:
    return None if operand is None else Shape(operand.shape, operand.dtype, operand.device)


def _site(x: Operand, linears: Sequence[Linear], scales: RowScale) -> str:
    """What the choice of launches depends on beside the rows."""
    each = [f"{tuple(w.shape)} {w.dtype} {None if b is None else b.dtype} {y.dtype}" for w, _, b, y, _ in linears]
    return f"{x.dtype} {x.shape[1]}, scale {scales.kind}: {', '.join(each)}".replace("torch.", "")


def _parts(linears: Sequence[Linear]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    boxes = [[_box(part) for part in (linear.w, linear.scale, linear.bias, linear.y)] for linear in linears]
    w, w_scale, bias, y = (list(column) for column in zip(*boxes, strict=True))
    return w, w_scale, bias, y


def _box(operand: Any) -> Any:
    return None if operand is None else operand.box
