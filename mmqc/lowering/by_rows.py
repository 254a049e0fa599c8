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
from mmqc.kernels.matmul.by_rows import After, Part
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, has_warpgroup_products
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
    site = _site(x, linears, scales)
    w, w_scale, bias, y = _columns(linears)
    args = (str(site), x.box, _box(scales.scale), _box(mask), w, w_scale, bias, y)
    call(by_rows.scaled, args, y, more_than(x.shape[0], WARPGROUP_ROWS), _expected(site))


def with_epilogue(
    x: Operand, linears: Sequence[Linear], scales: RowScale, mask: Operand | None, epilogue: Epilogue, next_mask: Operand | None
) -> None:
    """``scaled_matmul_epilogue`` of more rows than ``bound``."""
    codes, (low_x, low_w) = epilogue.next, epilogue.low or (None, None)
    term = () if low_x is None or low_w is None else (low_w.shape[1], low_x.dtype, low_w.dtype)
    after = After(epilogue.activation, epilogue.dtype, None if codes is None else codes.kind, epilogue.bits, *term)
    site = _site(x, linears, scales, after)
    w, w_scale, bias, y = _columns(linears)
    last = (_box(None if codes is None else codes.scale), _box(next_mask), epilogue.bits, _box(low_x), _box(low_w))
    args = (str(site), x.box, _box(scales.scale), _box(mask), w, w_scale, bias, y[0], epilogue.activation, epilogue.dtype, *last)
    call(by_rows.with_epilogue, args, y[:1], more_than(x.shape[0], WARPGROUP_ROWS), _expected(site))


def _site(x: Operand, linears: Sequence[Linear], scales: RowScale, *after: After) -> tuple[Any, ...]:
    """What the choice of launches depends on beside the rows: the arguments of ``expect``."""
    parts = [Part(w.shape[0], w.shape[1], w.dtype, None if b is None else b.dtype, y.dtype) for w, _, b, y, _ in linears]
    return x.device.index or 0, (x.dtype, x.shape[1]), scales.kind, tuple(tuple(part) for part in parts), *map(tuple, after)


def _expected(site: tuple[Any, ...]) -> str:
    """The line that asks for the kernels, where the generated code is loaded."""
    device, x, scale, parts, *after = site
    some = "".join(f"mmqc_by_rows.Part{part}, " for part in parts)
    args = [repr(device), repr(x), repr(scale), f"({some})", *(f"mmqc_by_rows.After{a}" for a in after)]
    return f"mmqc_by_rows.expect({', '.join(args)})"


def _columns(linears: Sequence[Linear]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    boxes = [[_box(part) for part in (linear.w, linear.scale, linear.bias, linear.y)] for linear in linears]
    w, w_scale, bias, y = (list(column) for column in zip(*boxes, strict=True))
    return w, w_scale, bias, y


def _box(operand: Any) -> Any:
    return None if operand is None else operand.box
