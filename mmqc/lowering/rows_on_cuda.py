"""What is done to every row, on CUDA, as launches in the generated code: the kernels' plans, of tensors that are not there yet.

    norm                  norm_quantize
    norm_per_token        norm_quantize_per_token
    quantize              quantize
    per_token             quantize_per_token
    transform             hadamard, hadamard_quantize
    transform_kept        hadamard_quantize_kept
    transform_per_token   hadamard_quantize_per_token
    basis                 basis_quantize_per_token

Each returns None where no kernel takes the operands: then the op is lowered as on any device.  ``why_not_…`` say of traced operands
what the kernel's plan would refuse, for a record of the graph.
On Hopper transforms of many rows, of a number that is known, are calls of the op: ``is_called``.  Of any number of rows a graph has
a launch for few and, if they are wide, a call for many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mmqc.kernels.hadamard import basis_quantize_per_token as basis_kernel
from mmqc.kernels.hadamard import hadamard_plan, hadamard_wgmma, transform_by_rows
from mmqc.kernels.hadamard import hadamard_quantize as hadamard_kernel
from mmqc.kernels.hadamard import hadamard_quantize_per_token as hadamard_per_token_kernel
from mmqc.kernels.hadamard.hadamard_tiles import Kept, Written
from mmqc.kernels.rows import norm_quantize as norm_kernel
from mmqc.kernels.rows import norm_quantize_per_token as norm_per_token_kernel
from mmqc.kernels.rows import quantize as quantize_kernel
from mmqc.kernels.rows import quantize_per_token as per_token_kernel
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS
from mmqc.kernels.shared.launch import Shape
from mmqc.kernels.shared.plan import Plan, Refusal
from mmqc.kernels.shared.row_scale import VISUAL
from mmqc.lowering.inductor import (
    TensorBox,
    as_int,
    at_least,
    at_most,
    constant,
    for_package,
    is_known_transform,
    lowerings,
    static_int,
)
from mmqc.lowering.launch import Operand, box_of, emit, expected, for_step, more_than, no_more_than
from mmqc.lowering.on_cuda import row_scale
from mmqc.lowering.python_call import call, has_python

aten = torch.ops.aten
Boxes = tuple[TensorBox, TensorBox, TensorBox]
INDUCTOR_ROWS = 256  # whose codes are left to Inductor: steps have graphs of so many, and there ours was not timed
TURNS = 1 << 20  # rows of a persistent grid for any number of them: programs without rows end at once


class Rows:
    """x [..., K] as the rows that a plan is made for, the other operands with as many, and memory for their results.

    Of any number of rows the plan is one for as many as are ``expected``.
    """

    def __init__(self, x: TensorBox, many: int | None = None) -> None:
        self.size, matrix = list(x.get_size()), Operand.matrix(x)
        self.count: Any = matrix.shape[0]
        self.planned = self.count if isinstance(self.count, int) else many or expected(self.count)
        self.x: Any = matrix.of(self.planned)

    def like_x(self, box: TensorBox | None) -> Any:
        """Another one [..., K]."""
        return None if box is None else Operand.matrix(box).of(self.planned)

    def new(self, width: int, dtype: torch.dtype) -> Any:
        """Memory for so many entries in every row."""
        return Operand.new((self.count, width), dtype, self.x.device).of(self.planned)

    def emit(self, plan: Plan[Any], runs: Any = None) -> Any:
        """Its launches, where ``runs`` is not 0; what they fill."""
        for launch in plan.launches:
            emit(launch, self.count, self.planned, runs)
        return plan.out

    def shaped(self, *found: Any) -> Any:
        """[M, P] as [..., P]."""
        return tuple(lowerings[aten.view.default](t.box, [*self.size[:-1], t.shape[1]]) for t in found)


def _operand(box: TensorBox | None) -> Any:
    return None if box is None else Operand(box)


def row_of(x: Any) -> Any:
    """A row of x, a traced tensor or a box, as kernels get it: conditions do not depend on how many there are."""
    if x is None:
        return None
    if isinstance(x, torch.Tensor):
        return Shape((1, int(x.shape[-1])), x.dtype, x.device)
    return Shape((1, static_int(x.get_size()[-1])), x.get_dtype(), x.get_device_or_error())


def vector_of(v: Any) -> Any:
    """A gain or a bias likewise."""
    row = row_of(v)
    return None if v is None else Shape(row.shape[1:], row.dtype, row.device)


def why_not_norm(
    x: Any, residual: Any, gain: Any, bias: Any, round_first: bool, order: Any, widths: Sequence[int], bits: Sequence[int]
) -> str | None:
    """None, or why norm_quantize_per_token's kernel cannot take these, boxes or traced."""
    norm = Norm(0.0, vector_of(gain), vector_of(bias), row_of(residual), round_first)
    return norm_per_token_kernel.why_not(row_of(x), norm, vector_of(order), widths, bits)


def why_not_basis(x: Any, u: Any, widths: Sequence[int], bits: Sequence[int]) -> str | None:
    """None, or why basis_quantize_per_token's kernel cannot take these, boxes or traced."""
    row = row_of(u)  # of a square matrix (ops/basis_quantize_per_token.py)
    return basis_kernel.why_not(row_of(x), row.of(row.shape[1]), widths, bits)


def why_not_transform(x: Any, up: Any, bits: int = 8, code: torch.dtype | None = None) -> str | None:
    """None, or why no kernel can transform x, a box or traced, and quantize it."""
    return hadamard_kernel.why_not(row_of(x), row_of(up), bits, code)


def norm(
    x: TensorBox,
    residual: TensorBox | None,
    gain: TensorBox | None,
    bias: TensorBox | None,
    eps: float,
    center: bool,
    round_first: bool,
    scale: TensorBox,
    visual: TensorBox | None,
    bits: int,
    kind: torch.dtype,
) -> tuple[TensorBox, TensorBox | None]:
    """Q, and x + r where there is a residual; what no kernel takes has been decomposed."""
    rows = Rows(x)
    given = Norm(eps, _operand(gain), _operand(bias), rows.like_x(residual), round_first, center)
    plan = norm_kernel.plan(rows.x, given, row_scale(scale, visual, rows.size[:-1]), bits, kind, rows.new)
    assert isinstance(plan, Plan), plan
    q, total = rows.emit(plan)
    return rows.shaped(q)[0], None if total is None else rows.shaped(total)[0]


def norm_per_token(
    x: TensorBox,
    residual: TensorBox | None,
    gain: TensorBox | None,
    bias: TensorBox | None,
    eps: float,
    round_first: bool,
    order: TensorBox | None,
    widths: Sequence[int],
    bits: Sequence[int],
) -> tuple[Boxes, TensorBox | None] | None:
    """Q, s and o, and x + r where there is a residual."""
    if why_not_norm(x, residual, gain, bias, round_first, order, widths, bits) is not None:
        return None
    rows = Rows(x)
    given = Norm(eps, _operand(gain), _operand(bias), rows.like_x(residual), round_first)
    plan = norm_per_token_kernel.plan(rows.x, given, _operand(order), widths, bits, rows.new)
    assert isinstance(plan, Plan), plan
    out, total = rows.emit(plan)
    return rows.shaped(*out), None if total is None else rows.shaped(total)[0]


def quantize(x: TensorBox, scale: TensorBox, visual: TensorBox | None, bits: int, kind: torch.dtype) -> TensorBox | None:
    """Q of many rows."""
    rows = Rows(x)
    if (isinstance(rows.count, int) or for_step()) and rows.planned <= INDUCTOR_ROWS:
        return None
    plan = quantize_kernel.plan(rows.x, row_scale(scale, visual, rows.size[:-1]), bits, kind, rows.new)
    return None if isinstance(plan, Refusal) else rows.shaped(rows.emit(plan))[0]


def per_token(x: TensorBox, widths: Sequence[int], bits: Sequence[int]) -> Boxes | None:
    """Q, s and o."""
    rows = Rows(x)
    plan = per_token_kernel.plan(rows.x, widths, bits, rows.new)
    return None if isinstance(plan, Refusal) else rows.shaped(*rows.emit(plan))


def basis(x: TensorBox, u: TensorBox, widths: Sequence[int], bits: Sequence[int]) -> Boxes | None:
    """Q, s and o of x U."""
    if why_not_basis(x, u, widths, bits) is not None:
        return None
    rows = Rows(x)
    plan = basis_kernel.plan(rows.x, _operand(u), widths, bits, rows.new)
    assert isinstance(plan, Plan), plan
    return rows.shaped(*rows.emit(plan))


def takes_transform(x: TensorBox, up: TensorBox | None, bits: int = 8, code: torch.dtype | None = None) -> bool:
    """Whether a transform of x is a launch, or a call of the op: its matrix is known by the width alone."""
    return is_known_transform(row_of(x).shape[1]) and why_not_transform(x, up, bits, code) is None


def is_called(x: TensorBox) -> bool:
    """Whether the op itself is called to transform x: by a kernel of Gluon's, which no launch in generated code has."""
    *rows, width = x.get_size()
    m: Any = as_int(math.prod(rows))
    if not isinstance(m, int) or for_package():
        return False
    return hadamard_wgmma.why_not(Shape((m, static_int(width)), x.get_dtype(), x.get_device_or_error())) is None  # type: ignore[arg-type]


def transform(
    x: TensorBox,
    up: TensorBox | None = None,
    scale: TensorBox | None = None,
    visual: TensorBox | None = None,
    bits: int = 8,
    code: torch.dtype | None = None,
) -> TensorBox:
    """Y, or with ``scale`` its codes, for which ``takes_transform``."""
    rows = Rows(x, TURNS)
    gate, scales = rows.like_x(up), None if scale is None else row_scale(scale, visual, rows.size[:-1])
    plan = hadamard_kernel.plan(rows.x, gate, matrices, scales, bits, code, rows.new, by_warpgroups=False)
    assert isinstance(plan, Plan), plan
    _emit_transform(rows, gate, plan, Written(plan.out, scales, bits=bits))
    return rows.shaped(plan.out)[0]


def transform_kept(
    x: TensorBox,
    up: TensorBox | None,
    kept: TensorBox,
    scale: TensorBox,
    visual: TensorBox | None,
    bits: int,
    code: torch.dtype,
) -> tuple[TensorBox, TensorBox] | None:
    """Its codes, for which ``takes_transform``, and the channels that are kept."""
    rows = Rows(x, TURNS)
    scales = row_scale(scale, visual, rows.size[:-1])
    gate, channels = rows.like_x(up), _operand(kept)
    plan = hadamard_kernel.plan_kept(rows.x, gate, matrices, channels, scales, bits, code, rows.new, by_warpgroups=False)
    if isinstance(plan, Refusal):
        return None
    q, some = plan.out
    _emit_transform(rows, gate, plan, Written(q, scales, bits=bits, kept=Kept(channels, some)))
    return rows.shaped(q, some)


def transform_per_token(x: TensorBox, up: TensorBox | None, bits: int) -> Boxes:
    """Q, s and o of the transform, for which ``takes_transform``."""
    rows = Rows(x, TURNS)
    gate = rows.like_x(up)
    plan = hadamard_per_token_kernel.plan(rows.x, gate, matrices, bits, rows.new, by_warpgroups=False)
    assert isinstance(plan, Plan), plan
    _emit_transform(rows, gate, plan, Written(plan.out.q, None, plan.out.scale, plan.out.offset, bits))
    return rows.shaped(*plan.out)


def _emit_transform(rows: Rows, gate: Any, plan: Plan[Any], written: Written) -> None:
    """The plan's launches, and of many rows, where their number is not known, a call in their place."""
    count, few, x = rows.count, WARPGROUP_ROWS, rows.x
    known = isinstance(count, int) or at_most(count, few) or not has_python()
    if known or hadamard_wgmma.why_not(x.of(few + 1)) is not None:
        rows.emit(plan)
        return
    if not at_least(count, few + 1):
        rows.emit(plan, no_more_than(count, few))
    static = written.rows
    kind = None if static is None else static.kind
    y, codes, kept = [box_of(written.y)], [box_of(written.scale), box_of(written.offset)], written.kept
    some = [] if kept is None else [box_of(kept.channels), box_of(kept.y)]
    site = transform_by_rows.Site(
        x.shape[1], x.dtype, gate is not None, written.y.dtype, written.bits, kind, codes[0] is not None,
        0 if kept is None else kept.channels.shape[0],
    )  # fmt: skip
    mask = static.rows if static is not None and kind == VISUAL.value else None
    scales = [box_of(None if static is None else static.scale), box_of(mask)]
    args = (tuple(site), x.box, box_of(gate), *y, *scales, *codes, *some)
    filled = [box for box in (*y, *codes, *some[1:]) if box is not None]
    once = f"mmqc_transform_by_rows.expect({x.device.index or 0}, {tuple(site)})"
    call(transform_by_rows.transform, args, filled, more_than(count, few), once)


def matrices(n: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A transform's matrices as constants of the graph."""
    name, tiling = f"mmqc_hadamard_{n}_{str(dtype).removeprefix('torch.')}", hadamard_plan.best_tiling(n, device)
    outer = constant(f"{name}_outer", lambda: hadamard_plan.hadamard_plan(n, device, dtype).outer)
    inner = constant(f"{name}_inner", lambda: hadamard_plan.hadamard_plan(n, device, dtype).inner)
    return hadamard_plan.HadamardPlan(tiling, Operand(outer), Operand(inner))  # type: ignore[arg-type]
