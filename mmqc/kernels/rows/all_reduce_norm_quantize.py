"""The sum over ranks, the residual, the norm and the static quantization behind a linear that ranks share: one kernel.

    h = r + Σ_rank x_rank                           (all_reduce.py, all_reduce_many.py; h is written out too)
    q = quantize(norm(h))                           (norm_quantize.py)

Shapes:  x, r, h [M, D] fp16 | bf16   q [M, D] int8 | fp8e4nv
Why:     of a decode step's rows a kernel's launch takes longer than what it does, and this is one for two or three; of a prompt's
         what follows is done while other rows are on their way.
"""

# Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.rows import all_reduce_many
from mmqc.kernels.rows.all_reduce import send_tile, sum_tile, warps_of, why_not
from mmqc.kernels.rows.all_reduce_many import send_row, sum_row
from mmqc.kernels.rows.norm_quantize import Norm, Normed, norm_tile
from mmqc.kernels.rows.norm_quantize import why_not as why_no_norm
from mmqc.kernels.shared.early_start import await_inputs, starts_early
from mmqc.kernels.shared.inboxes import Inboxes
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, rows_like
from mmqc.kernels.shared.quantize_codes import quantize_tile
from mmqc.kernels.shared.row_scale import RowScale, row_scale_tile


@triton.jit
def codes_of(
    total, gain_ptr, bias_ptr, s, D, at, mask, EPS: tl.constexpr, CENTER: tl.constexpr, HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr,
):
    """Q of a row h."""
    h = total.to(tl.float32)
    if CENTER:
        h = tl.where(mask, h - tl.sum(h) / D, 0.0)
    factor = tl.rsqrt(tl.sum(h * h) / D + EPS)
    y = norm_tile(h, factor, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, total.dtype, PTX)
    return quantize_tile(y, s, LOW, HIGH, FP8)


@triton.jit
def all_reduce_norm_quantize_kernel(
    x_ptr, residual_ptr, gain_ptr, bias_ptr, q_ptr, sum_ptr, scale_ptr, row_ptr, peers_ptr, count_ptr, M, D, stride_x, stride_r,
    rank, EPS: tl.constexpr, KIND: tl.constexpr, CENTER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, PATIENCE: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):
    """One row."""
    if EARLY:
        await_inputs()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < D
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    count = tl.load(count_ptr + row) + 1
    x = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0)
    send_tile(x, peers_ptr, row, D, at, mask, count, rank, RANKS, ROWS)
    one = row + tl.zeros((1,), tl.int32)
    s = tl.max(row_scale_tile(scale_ptr, row_ptr, one, one < M, KIND))  # arrives before the other ranks' rows, as does r
    r = tl.zeros((BLOCK,), dtype)
    if HAS_RESIDUAL:
        r = tl.load(residual_ptr + row * stride_r + at, mask=mask, other=0.0)
    total = sum_tile(x, peers_ptr, row, D, at, mask, count, rank, RANKS, ROWS, PATIENCE, PTX)
    total = (total.to(tl.float32) + r.to(tl.float32)).to(dtype)
    tl.store(sum_ptr + row * D + at, total, mask=mask)
    tl.store(count_ptr + row, count)
    q = codes_of(total, gain_ptr, bias_ptr, s, D, at, mask, EPS, CENTER, HAS_GAIN, HAS_BIAS, FIRST, LOW, HIGH, FP8, PTX)
    tl.store(q_ptr + row * D + at, q, mask=mask)


@triton.jit
def all_reduce_norm_quantize_many_kernel(
    x_ptr, residual_ptr, gain_ptr, bias_ptr, q_ptr, sum_ptr, scale_ptr, row_ptr, peers_ptr, count_ptr, M, D, stride_x, stride_r,
    rank, EPS: tl.constexpr, KIND: tl.constexpr, CENTER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr,
    RANKS: tl.constexpr, SLOTS: tl.constexpr, COUNTS: tl.constexpr, NUMBERS: tl.constexpr, FLAGS: tl.constexpr,
    PATIENCE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Every SLOTS-th row."""
    slot = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < D
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    count = tl.load(count_ptr + COUNTS + slot)
    row = slot.to(tl.int64)
    for _ in range(slot, M, SLOTS):
        count += 1
        x = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0)
        send_row(x, peers_ptr, slot, D, at, mask, count, rank, RANKS, SLOTS, NUMBERS, FLAGS)
        one = row.to(tl.int32) + tl.zeros((1,), tl.int32)
        s = tl.max(row_scale_tile(scale_ptr, row_ptr, one, one < M, KIND))
        r = tl.zeros((BLOCK,), dtype)
        if HAS_RESIDUAL:
            r = tl.load(residual_ptr + row * stride_r + at, mask=mask, other=0.0)
        total = sum_row(x, peers_ptr, slot, D, at, mask, count, rank, RANKS, SLOTS, NUMBERS, FLAGS, PATIENCE, PTX)
        total = (total.to(tl.float32) + r.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * D + at, total, mask=mask)
        q = codes_of(total, gain_ptr, bias_ptr, s, D, at, mask, EPS, CENTER, HAS_GAIN, HAS_BIAS, FIRST, LOW, HIGH, FP8, PTX)
        tl.store(q_ptr + row * D + at, q, mask=mask)
        row += SLOTS
    tl.store(count_ptr + COUNTS + slot, count)


def plan(
    x: Tensor, inboxes: Inboxes, norm: Norm, scales: RowScale, bits: int = 8, code: torch.dtype = torch.int8,
    new: New | None = None,
) -> Plan[Normed] | Refusal:
    """One launch, of a program a row, or a slot."""
    if reason := why_not(x, inboxes) or why_no_norm(x, norm, bits, code):
        return Refusal(reason)
    (m, width), new = x.shape, new or rows_like(x)
    q, total, block = new(width, code), new(width, x.dtype), triton.next_power_of_2(width)
    args = norm.args(x, total) | inboxes.args() | dict(q_ptr=q, scale_ptr=scales.scale, row_ptr=scales.rows, M=m)
    constants = norm.constants(x) | dict(
        KIND=scales.kind, CENTER=norm.center, LOW=-(2.0 ** (bits - 1)), HIGH=2.0 ** (bits - 1) - 1, FP8=code != torch.int8,
        BLOCK=block,
    )
    written = ("q_ptr", "sum_ptr", "count_ptr")
    if m > inboxes.rows:
        constants |= inboxes.constants_of_many()
        kernel, grid, warps = all_reduce_norm_quantize_many_kernel, (min(m, inboxes.slots),), all_reduce_many.warps_of(block)
        return Plan((Launch(kernel, grid, args, constants, written, warps, 1),), Normed(q, total))
    early = starts_early(x.device)
    constants |= inboxes.constants() | dict(EARLY=early)
    launch = Launch(all_reduce_norm_quantize_kernel, (m,), args, constants, written, warps_of(block), 1, block_rows=1, early=early)
    return Plan((launch,), Normed(q, total))
