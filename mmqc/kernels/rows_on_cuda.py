"""What is done to every row, on CUDA: importing this file registers the kernels as the ops' implementation.

    mmqc::quantize, norm_quantize, norm_quantize_per_token, quantize_per_token, hadamard, hadamard_quantize,
          hadamard_quantize_kept, hadamard_quantize_per_token, basis_quantize_per_token, power_clip, all_reduce,
          all_reduce_norm_quantize                    on CUDA   ->  the Triton kernels, rows flattened

What a kernel cannot take goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.kernels.hadamard import basis_quantize_per_token as basis_kernel
from mmqc.kernels.hadamard import hadamard_quantize as hadamard_kernel
from mmqc.kernels.hadamard import hadamard_quantize_per_token as hadamard_per_token_kernel
from mmqc.kernels.hadamard.hadamard_plan import matrices_of
from mmqc.kernels.rows import all_reduce as sum_kernel
from mmqc.kernels.rows import all_reduce_norm_quantize as sum_norm_kernel
from mmqc.kernels.rows import norm_quantize as norm_kernel
from mmqc.kernels.rows import norm_quantize_per_token as norm_per_token_kernel
from mmqc.kernels.rows import power_clip as clip_kernel
from mmqc.kernels.rows import quantize as quantize_kernel
from mmqc.kernels.rows import quantize_per_token as per_token_kernel
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.inboxes import OPENED
from mmqc.kernels.shared.plan import Refusal
from mmqc.kernels.shared.row_scale import Rows, RowScale, row_scale
from mmqc.ops import all_reduce as sum_op
from mmqc.ops import basis_quantize_per_token as basis_op
from mmqc.ops import hadamard as hadamard_op
from mmqc.ops import hadamard_quantize as hadamard_quantize_op
from mmqc.ops import hadamard_quantize_kept as hadamard_kept_op
from mmqc.ops import hadamard_quantize_per_token as hadamard_per_token_op
from mmqc.ops import norm_quantize as norm_op
from mmqc.ops import norm_quantize_per_token as norm_per_token_op
from mmqc.ops import power_clip as clip_op
from mmqc.ops import quantize as quantize_op
from mmqc.ops import quantize_per_token as per_token_op
from mmqc.ops.define import use_on_cuda
from mmqc.ops.quantize import check_scale, code_dtype


def _rows(x: Tensor) -> Tensor:
    """[..., K] as rows; a copy only if its rows are not contiguous."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _scales(scale: Tensor, visual: Tensor | None, x: Tensor, m: int) -> RowScale:
    """The static scale of each of x's m rows."""
    check_scale(scale, visual)
    return row_scale(scale.float(), m, None if visual is None else visual.expand(x.shape[:-1]).reshape(-1))


def _shaped(rows: Rows, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = (*like.shape[:-1], rows.scale.shape[1])
    return rows.q.view(like.shape), rows.scale.view(size), rows.offset.view(size)


def quantize(x: Tensor, scale: Tensor, visual: Tensor | None, bits: int, code: torch.dtype | None = None) -> Tensor:
    """``mmqc::quantize`` on CUDA."""
    rows, kind = _rows(x), code_dtype(bits, code)
    plan = quantize_kernel.plan(rows, _scales(scale, visual, x, len(rows)), bits, kind)
    return quantize_op.contiguous_reference(x, scale, visual, bits, code) if isinstance(plan, Refusal) else plan.run().view(x.shape)


def norm_quantize(
    x: Tensor, residual: Tensor | None, gain: Tensor | None, bias: Tensor | None, eps: float, center: bool, round_first: bool,
    scale: Tensor, visual: Tensor | None, bits: int, code: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``mmqc::norm_quantize`` on CUDA."""
    norm_op.check(x, residual, gain, bias)
    rows, kind = _rows(x), code_dtype(bits, code)
    norm = Norm(eps, gain, bias, None if residual is None else _rows(residual), round_first, center)
    plan = norm_kernel.plan(rows, norm, _scales(scale, visual, x, len(rows)), bits, kind)
    if isinstance(plan, Refusal):
        return norm_op.reference(x, residual, gain, bias, eps, center, round_first, scale, visual, bits, code)
    q, total = plan.run()
    return q.view(x.shape), x.new_empty(0) if total is None else total.view(x.shape)


def norm_quantize_per_token(
    x: Tensor, residual: Tensor | None, gain: Tensor | None, bias: Tensor | None, eps: float, round_first: bool,
    order: Tensor | None, widths: Sequence[int], bits: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mmqc::norm_quantize_per_token`` on CUDA."""
    norm_op.check(x, residual, gain, bias)
    rows, norm = _rows(x), Norm(eps, gain, bias, None if residual is None else _rows(residual), round_first)
    plan = norm_per_token_kernel.plan(rows, norm, order, widths, bits)
    if isinstance(plan, Refusal):
        return norm_per_token_op.reference(x, residual, gain, bias, eps, round_first, order, widths, bits)
    out, total = plan.run()
    return *_shaped(out, x), x.new_empty(0) if total is None else total.view(x.shape)


def quantize_per_token(
    x: Tensor, order: Tensor | None, widths: Sequence[int], bits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::quantize_per_token`` on CUDA."""
    per_token_op.check_parts(x.shape[-1], widths, bits)
    rows = _rows(x) if order is None else _rows(x).index_select(1, order)
    plan = per_token_kernel.plan(rows, widths, bits)
    return per_token_op.reference(x, order, widths, bits) if isinstance(plan, Refusal) else _shaped(plan.run(), x)


def hadamard(x: Tensor, factors: list[Tensor]) -> Tensor:
    """``mmqc::hadamard`` on CUDA."""
    hadamard_op.check(x, factors)
    rows = _rows(x)
    plan = hadamard_kernel.plan(rows, None, matrices_of(factors))
    return hadamard_op.reference(x, factors) if isinstance(plan, Refusal) else plan.run().view(x.shape)


def hadamard_quantize(
    x: Tensor, up: Tensor | None, factors: list[Tensor], scale: Tensor, visual: Tensor | None, bits: int,
    code: torch.dtype | None = None,
) -> Tensor:
    """``mmqc::hadamard_quantize`` on CUDA."""
    hadamard_op.check(x, factors)
    rows, gate, kind = _rows(x), None if up is None else _rows(up), code_dtype(bits, code)
    scales = _scales(scale, visual, x, len(rows))
    plan = hadamard_kernel.plan(rows, gate, matrices_of(factors), scales, bits, kind)
    if isinstance(plan, Refusal):
        return hadamard_quantize_op.reference(x, up, factors, scale, visual, bits, code)
    return plan.run().view(x.shape)


def hadamard_quantize_kept(
    x: Tensor, up: Tensor | None, factors: list[Tensor], kept: Tensor, scale: Tensor, visual: Tensor | None, bits: int,
    code: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``mmqc::hadamard_quantize_kept`` on CUDA."""
    hadamard_op.check(x, factors)
    rows, gate, kind = _rows(x), None if up is None else _rows(up), code_dtype(bits, code)
    scales = _scales(scale, visual, x, len(rows))
    plan = hadamard_kernel.plan_kept(rows, gate, matrices_of(factors), kept, scales, bits, kind)
    if isinstance(plan, Refusal):
        return hadamard_kept_op.reference(x, up, factors, kept, scale, visual, bits, code)
    q, some = plan.run()
    return q.view(x.shape), some.view(*x.shape[:-1], kept.shape[0])


def hadamard_quantize_per_token(
    x: Tensor, up: Tensor | None, factors: list[Tensor], bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::hadamard_quantize_per_token`` on CUDA."""
    hadamard_op.check(x, factors)
    rows, gate = _rows(x), None if up is None else _rows(up)
    plan = hadamard_per_token_kernel.plan(rows, gate, matrices_of(factors), bits)
    return hadamard_per_token_op.reference(x, up, factors, bits) if isinstance(plan, Refusal) else _shaped(plan.run(), x)


def basis_quantize_per_token(
    x: Tensor, basis: Tensor, widths: Sequence[int], bits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::basis_quantize_per_token`` on CUDA."""
    basis_op.check(x, basis)
    rows = _rows(x)
    plan = basis_kernel.plan(rows, basis, widths, bits)
    return basis_op.reference(x, basis, widths, bits) if isinstance(plan, Refusal) else _shaped(plan.run(), x)


def power_clip(
    w: Tensor, scale: Tensor, zero: Tensor | None, cost: Tensor | None, shrinks: Sequence[float], power: float, bits: int
) -> Tensor:
    """``mmqc::power_clip`` on CUDA."""
    clip_op.check(w, scale, zero, cost, shrinks, bits)
    if clip_kernel.supports(w, scale, zero, cost) is not None:
        return clip_op.reference(w, scale, zero, cost, shrinks, power, bits)
    return clip_kernel.power_clip(w, scale, zero, cost, shrinks, power, bits)


def all_reduce(x: Tensor, group: str) -> Tensor:
    """``mmqc::all_reduce`` on CUDA; many rows, where their number was not known before, are the group's."""
    box = OPENED.of(group, x.shape[-1])
    plan = Refusal("no inboxes") if box is None else sum_kernel.plan(_rows(x), box)
    return sum_op.reference(x, group) if isinstance(plan, Refusal) else plan.run().view(x.shape)


def all_reduce_norm_quantize(
    x: Tensor, group: str, residual: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, center: bool,
    round_first: bool, scale: Tensor, visual: Tensor | None, bits: int, code: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``mmqc::all_reduce_norm_quantize`` on CUDA."""
    norm_op.check(x, residual, gain, bias)
    norm = Norm(eps, gain, bias, _rows(residual), round_first, center)
    rows, box = _rows(x), OPENED.of(group, x.shape[-1])
    scales, kind = _scales(scale, visual, x, rows.shape[0]), code_dtype(bits, code)
    plan = Refusal("no inboxes") if box is None else sum_norm_kernel.plan(rows, box, norm, scales, bits, kind)
    if isinstance(plan, Refusal):
        total = all_reduce(x, group)
        return norm_quantize(total, residual, gain, bias, eps, center, round_first, scale, visual, bits, code)
    q, total = plan.run()
    assert total is not None
    return q.view(x.shape), total.view(x.shape)


for implementation in (
    quantize, norm_quantize, norm_quantize_per_token, quantize_per_token, hadamard, hadamard_quantize, hadamard_quantize_kept,
    hadamard_quantize_per_token, basis_quantize_per_token, power_clip, all_reduce, all_reduce_norm_quantize,
):
    use_on_cuda(implementation)
