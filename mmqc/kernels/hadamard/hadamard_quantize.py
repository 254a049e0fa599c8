"""A Hadamard transform of every row (ops/hadamard.py), what stands in front of it and the quantization behind it, in one pass.

    h = x,  or  silu(x) ∘ u            y = h (F1 ⊗ … ⊗ Fr)ᵀ            q = clamp(round(y / s(m)))   (optional)

Shapes:  x, u [M, n] fp16 | bf16 (fp32 in the interpreter, ieee)   y [M, n] like x, or q int8 | fp8e4nv   s: row_scale.py;
         asymmetric per token: hadamard_quantize_per_token.py
How:     Y = A X Bᵀ on tiles (hadamard_plan.py); a program keeps both matrices and walks over rows.  A Y Bᵀ rounds twice to
         x's dtype (h, A h), sums are float32.
Bytes:   one read and one write of every element.
Few:     several programs on each row (hadamard_slices.py).      Many: on Hopper, wide ones go to hadamard_wgmma.py.
Arch:    Ampere and newer; fp8 from compute capability 8.9.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.hadamard import hadamard_wgmma, silu_multiply
from mmqc.kernels.hadamard.hadamard_plan import HadamardPlan, Matrices, best_tiling, outer_factor, shared_need
from mmqc.kernels.hadamard.hadamard_slices import COLUMNS, few, hadamard_slices_kernel, slices
from mmqc.kernels.hadamard.hadamard_tiles import STATIC, Kept, Written, kept_channels, store_kept, write_tiles
from mmqc.kernels.rows import quantize
from mmqc.kernels.shared.activation_tiles import input_tile
from mmqc.kernels.shared.device_facts import (
    INTERPRETED,
    ceil_div,
    fp8_reason,
    has_inline_ptx,
    multiprocessors,
    power_of_two,
    shared_bytes,
    why_not_here,
)
from mmqc.kernels.shared.early_start import await_inputs, starts_early
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, first_reason, rows_like
from mmqc.kernels.shared.row_scale import RowScale, row_scale_tile
from mmqc.ops import hadamard_quantize_kept

DTYPES = (torch.float16, torch.bfloat16, *((torch.float32,) if INTERPRETED else ()))
CODES = (None, torch.int8, torch.float8_e4m3fn)
ROWS = 64  # of which a program gathers channels


@triton.jit
def hadamard_quantize_kernel(
    x_ptr, up_ptr, outer_ptr, inner_ptr, y_ptr, channel_ptr, kept_ptr, scale_ptr, row_ptr, token_ptr, offset_ptr, M, n, a, b,
    stride_x, stride_up, KEPT: tl.constexpr, SCALE: tl.constexpr, OUTER: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr,
    B: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr, PROGRAMS: tl.constexpr,
):
    """R rows of x a turn: tile row t is row t // A1 of x, part t % A1; a second tile holds parts A1 … of one row."""
    if EARLY:
        await_inputs()
    PARTS: tl.constexpr = A1 if OUTER else 1  # pyright: ignore[reportAssignmentType]  # Triton wraps the 1
    SIDE: tl.constexpr = R * PARTS
    WIDTH: tl.constexpr = SIDE + A2
    part = tl.arange(0, SIDE)
    j = tl.arange(0, B)
    i, local = part % PARTS, part // PARTS
    inner_t = tl.load(inner_ptr + j[None, :] * B + j[:, None])  # [B, B], transposed
    if OUTER:
        a11 = tl.load(outer_ptr + part[:, None] * WIDTH + part[None, :])
    if A2 > 0:
        more = A1 + tl.arange(0, A2)
        a12 = tl.load(outer_ptr + part[:, None] * WIDTH + more[None, :])
        a21_t = tl.load(outer_ptr + more[None, :] * WIDTH + part[:, None])
        a22_t = tl.load(outer_ptr + more[None, :] * WIDTH + more[:, None])
    r, kept, chosen_t = kept_channels(channel_ptr, inner_ptr, j, b, B, KEPT)  # pyright: ignore[reportGeneralTypeIssues]
    for block in tl.range(tl.program_id(0), tl.cdiv(M, R), PROGRAMS):  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
        rows = block * R + local
        row_mask = rows < M
        inside = i[:, None] * b + j[None, :]
        mask = (row_mask & (i < a))[:, None] & (j < b)[None, :]
        wide = rows.to(tl.int64)[:, None]
        t = input_tile(x_ptr, up_ptr, wide * stride_x + inside, wide * stride_up + inside, mask, GATED, PTX)
        y2, mask2, at2 = t, mask, inside  # of the short part, if there is one
        if A2 > 0:
            # The short part as columns: all products then are those of wide tiles, and share their operands.
            row = tl.cast(block, tl.int64)
            inside2 = more[:, None] * b + j[None, :]
            mask2, at2 = (more < a)[:, None] & (j < b)[None, :], row * n + inside2
            x2 = input_tile(x_ptr, up_ptr, row * stride_x + inside2, row * stride_up + inside2, mask2, GATED, PTX)
            t2 = tl.dot(tl.trans(x2), a22_t, tl.dot(tl.trans(t), a21_t, input_precision="ieee"), input_precision="ieee")
            y2 = tl.dot(tl.trans(inner_t), t2.to(t.dtype), input_precision="ieee")  # [B, A2]
            short = tl.trans(t2.to(t.dtype))
            store_kept(short, chosen_t, more, more < a, r, kept, kept_ptr, row + tl.zeros_like(more), SCALE, KEPT)
            t1 = tl.dot(a12, x2, tl.dot(a11, t, input_precision="ieee"), input_precision="ieee")
            t = t1.to(t.dtype)
        elif OUTER:
            t = tl.dot(a11, t, input_precision="ieee").to(t.dtype)
        store_kept(t, chosen_t, i, row_mask, r, kept, kept_ptr, rows.to(tl.int64), SCALE, KEPT)
        y = tl.dot(t, inner_t, input_precision="ieee")
        factor = tl.full((SIDE,), SCALE, tl.float32)
        if MODE == STATIC:
            factor = tl.div_rn(factor, row_scale_tile(scale_ptr, row_ptr, rows, row_mask, KIND))
        write_tiles(
            y, y2, factor, y_ptr, token_ptr, offset_ptr, rows, row_mask & (i == 0), wide * n + inside, at2, mask, mask2, MODE,
            SCALE, LOW, HIGH, FP8, x_ptr.dtype.element_ty, PTX, R, PARTS, A2,
        )


@triton.jit
def gather_channels_kernel(
    y_ptr, channel_ptr, kept_ptr, M, n, KEPT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """ROWS rows of y [M, n], of which KEPT channels are written."""
    row, r = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    channel = tl.load(channel_ptr + r, mask=r < KEPT, other=0)
    mask, wide = (row < M)[:, None] & (r < KEPT)[None, :], row.to(tl.int64)[:, None]
    y = tl.load(y_ptr + wide * n + channel[None, :], mask=mask, other=0.0)
    tl.store(kept_ptr + wide * KEPT + r[None, :], y, mask=mask)


def why_not(x: Tensor, up: Tensor | None, bits: int = 8, code: torch.dtype | None = None) -> str | None:
    """None, or why these operands cannot be transformed here; ``code`` None: into x's dtype."""
    if len(x.shape) != 2:
        return f"x is a matrix, not {list(x.shape)}"
    if x.dtype not in DTYPES:
        return f"{x.dtype} activations are transformed in float32 or wider"
    n, tiling = x.shape[1], best_tiling(x.shape[1], x.device)
    checks = (
        (not isinstance(tiling, str), str(tiling)),
        (x.stride(1) == 1 or n == 1, "rows of x are contiguous"),
        (up is None or (up.shape == x.shape and up.dtype == x.dtype and (up.stride(1) == 1 or n == 1)), "up is like x"),
        (code in CODES, f"codes are int8 or float8_e4m3fn, not {code}"),
        (2 <= bits <= 8 and (bits == 8 or code == torch.int8), f"bits = {bits}: 2 to 8 for int8 codes, else 8"),
    )
    reason = first_reason(checks) or why_not_here(x, up)
    return fp8_reason(x.device) if reason is None and code == torch.float8_e4m3fn else reason


def plan(
    x: Tensor, up: Tensor | None, matrices: Matrices, scales: RowScale | None = None, bits: int = 8,
    code: torch.dtype | None = None, new: New | None = None, *, by_warpgroups: bool = True,
) -> Plan[Tensor] | Refusal:
    """Transform x, or with ``up`` silu(x) * up, and quantize it by ``scales``; ``code`` None leaves y in x's dtype.

    ``by_warpgroups``: whether Gluon's kernels may be among the launches, which no compiled graph takes.
    """
    reason = why_not(x, up, bits, code)
    found = Refusal(reason) if reason else matrices(x.shape[1], x.device, x.dtype)
    if isinstance(found, Refusal):
        return found
    new = new or rows_like(x)
    written = Written(new(x.shape[1], code or x.dtype), scales, bits=bits)
    return Plan(launches(x, up, written, found, new, by_warpgroups), written.y)


def plan_kept(
    x: Tensor, up: Tensor | None, matrices: Matrices, kept: Tensor, scales: RowScale, bits: int = 8,
    code: torch.dtype = torch.int8, new: New | None = None, *, by_warpgroups: bool = True,
) -> Plan[tuple[Tensor, Tensor]] | Refusal:
    """The same with ``kept`` channels [r] of y beside its codes."""
    reason = why_not(x, up, bits, code)
    if reason is None and not (len(kept.shape) == 1 and kept.dtype == torch.int64 and kept.shape[0] <= hadamard_quantize_kept.MOST):
        reason = f"up to {hadamard_quantize_kept.MOST} channels are kept, an int64 vector, not {kept.dtype} {list(kept.shape)}"
    found = Refusal(reason) if reason else matrices(x.shape[1], x.device, x.dtype)
    if isinstance(found, Refusal):
        return found
    new = new or rows_like(x)
    some = Kept(kept, new(kept.shape[0], x.dtype))
    written = Written(new(x.shape[1], code), scales, bits=bits, kept=some)
    return Plan(launches(x, up, written, found, new, by_warpgroups), (written.y, some.y))


def launches(
    x: Tensor, up: Tensor | None, written: Written, matrices: HadamardPlan, new: New, by_warpgroups: bool
) -> tuple[Launch, ...]:
    """Fill what is written of x, for which ``why_not`` found nothing, by the fastest kernel for so many rows."""
    if by_warpgroups and hadamard_wgmma.why_not(x) is None and hadamard_wgmma.why_not_at(x, written.y) is None:
        if written.kept is not None:
            return kept_launches(x, up, written, written.kept, matrices, new)
        if up is None:
            return (hadamard_wgmma.launch(x, written),)
        h = new(x.shape[1], x.dtype)
        return silu_multiply.launch(x, up, h), hadamard_wgmma.launch(h, written)
    in_slices = written.scale is None and few(x, matrices.tiling)  # a program that sees a part of a row finds no scale
    return (slices_launch(x, up, written, matrices) if in_slices else rows_launch(x, up, written, matrices),)


def kept_launches(
    x: Tensor, up: Tensor | None, written: Written, kept: Kept, matrices: HadamardPlan, new: New
) -> tuple[Launch, ...]:
    """By way of y: the kernel of many wide rows keeps no channels, and is twice as fast as the one that does."""
    y = Written(new(x.shape[1], x.dtype))
    assert written.rows is not None
    codes = quantize.plan(y.y, written.rows, written.bits, written.y.dtype, lambda width, dtype: written.y)
    assert isinstance(codes, Plan), codes
    return *launches(x, up, y, matrices, new, by_warpgroups=True), *codes.launches, gather_launch(y.y, kept)


def gather_launch(y: Tensor, kept: Kept) -> Launch:
    """The channels of rows that are in memory."""
    m, count = kept.y.shape
    args = dict(y_ptr=y, channel_ptr=kept.channels, kept_ptr=kept.y, M=m, n=y.shape[1])
    constants = dict(KEPT=count, BLOCK=power_of_two(count), ROWS=ROWS)
    return Launch(gather_channels_kernel, (ceil_div(m, ROWS),), args, constants, ("kept_ptr",), 4, 1, block_rows=ROWS)


def slices_launch(x: Tensor, up: Tensor | None, written: Written, p: HadamardPlan) -> Launch:
    """Several programs on each row."""
    t, args, constants = p.tiling, _args(x, up, written, p), _constants(x, up, written, p)
    constants |= dict(WIDTH=t.A1 + t.A2, STEP=t.A2 or min(t.A1, 64), COLUMNS=min(t.B, COLUMNS))
    early, filled = constants["EARLY"], ("y_ptr", *(() if written.kept is None else ("kept_ptr",)))
    return Launch(hadamard_slices_kernel, (x.shape[0], *slices(t)), args, constants, filled, 4, 3, early=early)


def rows_launch(
    x: Tensor, up: Tensor | None, written: Written, p: HadamardPlan, programs: int | None = None
) -> Launch:
    """Whole rows, by turns, in as many ``programs`` as the device holds, or as are asked for."""
    t, (m, n) = p.tiling, x.shape
    small, operands = t.side * t.B <= 8192, 1 if up is None else 2
    # With one turn in shared memory, not two, two programs fit a multiprocessor, which is worth a third where A is in one
    # part; both gated operands are staged, and fit only so.
    most, warps = 3 if small else 2 if up is None and t.A2 else 1, 4 if small else 8
    room = shared_bytes(x.device)
    stages = next((s for s in range(most, 1, -1) if shared_need(t, x.device, s, operands) <= room), 1)
    programs = min(ceil_div(m, t.R), programs or multiprocessors(x.device) * (2 if not small else 4 if n > 2048 else 8))
    args = _args(x, up, written, p) | written.token_args(written.y)
    constants = _constants(x, up, written, p) | dict(OUTER=t.a > 1, A1=t.A1, A2=t.A2, R=t.R, PROGRAMS=programs)
    more = (("offset_ptr", written.offset), ("kept_ptr", written.kept))
    filled = ("y_ptr", "token_ptr", *(name for name, tensor in more if tensor is not None))
    return Launch(hadamard_quantize_kernel, (programs,), args, constants, filled, warps, stages, early=constants["EARLY"])


def _args(x: Tensor, up: Tensor | None, written: Written, p: HadamardPlan) -> dict[str, Any]:
    (m, n), t = x.shape, p.tiling
    return dict(
        x_ptr=x, up_ptr=x if up is None else up, outer_ptr=p.outer, inner_ptr=p.inner, y_ptr=written.y, M=m, n=n, a=t.a, b=t.b,
        stride_x=x.stride(0), stride_up=0 if up is None else up.stride(0), **written.scale_args(p.outer),
        **written.kept_args(p.outer),
    )


def _constants(x: Tensor, up: Tensor | None, written: Written, p: HadamardPlan) -> dict[str, Any]:
    t = p.tiling
    return dict(
        SCALE=1 / (outer_factor(t) * math.sqrt(t.a * t.b)),  # as an argument, Inductor would make it float64
        KEPT=0 if written.kept is None else written.kept.channels.shape[0], GATED=up is not None,
        FP8=written.y.dtype == torch.float8_e4m3fn, B=t.B,
        PTX=has_inline_ptx(x.device) and x.dtype != torch.float32, EARLY=starts_early(x.device, x.shape[0]), **written.constants(),
    )
