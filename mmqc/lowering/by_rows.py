"""Linears of more than some rows, of a number that is known when they run: a call that chooses by it (kernels/matmul/by_rows.py).

bound(x, linears)            rows up to which a graph for any number has launches of its own; None: for all
scaled, with_epilogue        the call for more of them, and the kernels that it may want, compiled meanwhile
weight_only                  the call for ``between`` few and many
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sympy import Expr

from mmqc.kernels.matmul import by_rows, scaled_matmul, weight_only_matmul
from mmqc.kernels.matmul.by_rows import After, Groups, Part
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, has_warpgroup_products
from mmqc.kernels.shared.row_scale import RowScale
from mmqc.kernels.warpgroup import byte_matmul, packed_matmul
from mmqc.lowering.inductor import at_least, at_most
from mmqc.lowering.launch import REGIMES, Operand, box_of, more_than, no_more_than
from mmqc.lowering.python_call import call, has_python


def bound(x: Operand, linears: Sequence[Linear], group_size: int = 0) -> int | None:
    """Rows up to which a graph has launches of its own; None where it has them for every number."""
    given: Any = x
    up_to = packed_matmul.FEW if scaled_matmul.stays_packed(given, linears) else WARPGROUP_ROWS
    up_to = REGIMES[-1] if group_size else up_to  # more multiply codes times scales, or weights that are written out
    known = not isinstance(x.shape[0], Expr) or at_most(x.shape[0], up_to)
    return None if known or not has_python() or not has_warpgroup_products(x.device) else up_to


def scaled(x: Operand, linears: Sequence[Linear], scales: RowScale, mask: Operand | None, up_to: int, group_size: int = 0) -> None:
    """``scaled_matmuls`` of more rows than ``up_to``, which ``bound`` gave."""
    integer, groups = linears[0].group_scale, [box_of(linear.group_scale) for linear in linears]
    known = Groups(None if integer is None else integer.dtype, group_size) if group_size else None
    site = _site(x, linears, scales, groups=known)
    w, w_scale, bias, y = _columns(linears)
    args = (str(site), x.box, box_of(scales.scale), box_of(mask), w, w_scale, bias, y, groups, group_size)
    call(by_rows.scaled, args, y, more_than(x.shape[0], up_to), _expected(site))


def with_epilogue(
    x: Operand,
    linears: Sequence[Linear],
    scales: RowScale,
    mask: Operand | None,
    epilogue: Epilogue,
    next_mask: Operand | None,
    up_to: int,
) -> None:
    """``scaled_matmul_epilogue`` of more rows than ``up_to``, which ``bound`` gave."""
    codes, (low_x, low_w) = epilogue.next, epilogue.low or (None, None)
    term = () if low_x is None or low_w is None else (low_w.shape[1], low_x.dtype, low_w.dtype)
    after = After(epilogue.activation, epilogue.dtype, None if codes is None else codes.kind, epilogue.bits, *term)
    site = _site(x, linears, scales, after)
    w, w_scale, bias, y = _columns(linears)
    last = (box_of(None if codes is None else codes.scale), box_of(next_mask), epilogue.bits, box_of(low_x), box_of(low_w))
    first = (str(site), x.box, box_of(scales.scale), box_of(mask), w, w_scale, bias, y[0])
    args = (*first, epilogue.activation, epilogue.dtype, *last)
    call(by_rows.with_epilogue, args, y[:1], more_than(x.shape[0], up_to), _expected(site))


def between(x: Operand, linears: Sequence[Linear], bits: int, zero: Operand | None, group_size: int) -> tuple[int, int] | None:
    """(few, some): more rows than the first, up to the second, are for ``weight_only``; None where none are."""
    given: Any = x.of(byte_matmul.SOME)
    rows, few, some = x.shape[0], byte_matmul.FEW, byte_matmul.SOME
    if bits != 8 or not has_python() or at_most(rows, few) or at_least(rows, some + 1):
        return None
    takes = weight_only_matmul.stay_bytes(given, linears, zero, group_size)  # type: ignore[arg-type]
    return (few, some) if takes else None


def weight_only(x: Operand, linears: Sequence[Linear]) -> None:
    """``weight_only_matmuls`` of as many rows as ``between`` says."""
    rows, few, some = x.shape[0], byte_matmul.FEW, byte_matmul.SOME
    device, parts = x.device.index or 0, [_part(linear) for linear in linears]
    site = device, (x.dtype, x.shape[1]), tuple(map(tuple, parts)), linears[0].scale.dtype
    w, w_scale, bias, y = _columns(linears)
    runs = [more_than(rows, few), no_more_than(rows, some)]
    meant = [r for r in runs if r is not None]
    said = "".join(f"mmqc_by_rows.Part{tuple(part)}, " for part in parts)
    expected = f"mmqc_by_rows.expect_bytes({device!r}, {site[1]!r}, ({said}), {site[3]!r})"
    call(by_rows.weight_only, (str(site), x.box, w, w_scale, bias, y), y, math.prod(meant) if meant else None, expected)


def _part(linear: Linear) -> Part:
    w, _, b, y, _ = linear
    return Part(w.shape[0], w.shape[1], w.dtype, None if b is None else b.dtype, y.dtype)


def _site(
    x: Operand, linears: Sequence[Linear], scales: RowScale, after: After | None = None, groups: Groups | None = None
) -> tuple[Any, ...]:
    """What the choice of launches depends on beside the rows: the arguments of ``expect``."""
    parts = tuple(tuple(_part(linear)) for linear in linears)
    return x.device.index or 0, (x.dtype, x.shape[1]), scales.kind, parts, after and tuple(after), groups and tuple(groups)


def _expected(site: tuple[Any, ...]) -> str:
    """The line that asks for the kernels, where the generated code is loaded."""
    device, x, scale, parts, after, groups = site
    some = "".join(f"mmqc_by_rows.Part{part}, " for part in parts)
    args = [repr(device), repr(x), repr(scale), f"({some})"]
    args += [f"after=mmqc_by_rows.After{after}"] if after else []
    args += [f"groups=mmqc_by_rows.Groups{groups}"] if groups else []
    return f"mmqc_by_rows.expect({', '.join(args)})"


def _columns(linears: Sequence[Linear]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    boxes = [[box_of(part) for part in (linear.w, linear.scale, linear.bias, linear.y)] for linear in linears]
    w, w_scale, bias, y = (list(column) for column in zip(*boxes, strict=True))
    return w, w_scale, bias, y
