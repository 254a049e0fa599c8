"""A Hadamard transform of every row (ops/hadamard.py), what stands in front of it and the quantization behind it, in one pass.

    h = x,  or  silu(x) ∘ u            y = h (F1 ⊗ … ⊗ Fr)ᵀ            q = clamp(round(y / s(m)))   (optional)

Shapes:  x, u [M, n] fp16 | bf16 | fp32 (interpreter, ieee)   y [M, n] like x, or q int8 | fp8e4nv   s: row_scale.py, or
         dynamic per token (max|y[m]| / 127, returned); asymmetric per token: hadamard_quantize_per_token.py
How:     Y = A X Bᵀ on tiles (hadamard_plan.py); a program keeps both matrices and walks over rows.  A Y Bᵀ rounds twice to
         x's dtype (h, A h), sums are float32.
Bytes:   one read and one write of every element.
Many:    many wide rows go to hadamard_wgmma.py on Hopper, unless an option asks for this kernel.
Arch:    Ampere and newer; fp8 from compute capability 8.9.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.hadamard import hadamard_wgmma as in_warpgroups
from mmqc.kernels.hadamard.hadamard_plan import HadamardPlan, best_tiling, hadamard_plan, outer_factor
from mmqc.kernels.hadamard.hadamard_slices import COLUMNS, few, hadamard_slices_kernel, slices
from mmqc.kernels.hadamard.hadamard_tiles import ASYMMETRIC, DYNAMIC, FLOAT, STATIC, write_tiles
from mmqc.kernels.rows.silu_multiply import silu_multiply
from mmqc.kernels.shared.activation_tiles import input_tile
from mmqc.kernels.shared.device_facts import ceil_div, fp8_reason, has_inline_ptx, multiprocessors, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.quantize_codes import token_scale
from mmqc.kernels.shared.row_scale import ROW, RowScale, row_scale, row_scale_tile

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOAT32_BYTES = 100_000  # of shared memory for both matrices, next to the rows in flight


class Transformed(NamedTuple):
    """y or its codes, and the scales of a dynamic quantization."""

    y: Tensor
    scale: Tensor | None


@triton.jit
def hadamard_quantize_kernel(
    x_ptr, up_ptr, outer_ptr, inner_ptr, y_ptr, scale_ptr, row_ptr, token_ptr, offset_ptr, M, n, a, b, stride_x, stride_up,
    SCALE: tl.constexpr, OUTER: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
    GATED: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr,
    PTX: tl.constexpr, PROGRAMS: tl.constexpr,
):
    """R rows of x a turn: tile row t is row t // A1 of x, part t % A1; a second tile holds parts A1 … of one row."""
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
            t1 = tl.dot(a12, x2, tl.dot(a11, t, input_precision="ieee"), input_precision="ieee")
            t = t1.to(t.dtype)
        elif OUTER:
            t = tl.dot(a11, t, input_precision="ieee").to(t.dtype)
        y = tl.dot(t, inner_t, input_precision="ieee")
        factor = tl.full((SIDE,), SCALE, tl.float32)
        if MODE == STATIC:
            factor = tl.div_rn(factor, row_scale_tile(scale_ptr, row_ptr, rows, row_mask, KIND))
        elif MODE == DYNAMIC:
            largest = tl.max(tl.abs(y), 1) * SCALE
            if A2 > 0:
                s = token_scale(tl.maximum(tl.max(largest), tl.max(tl.abs(y2)) * SCALE), FP8) + tl.zeros_like(factor)
            else:
                token = token_scale(tl.max(tl.reshape(largest, (R, PARTS)), 1), FP8)
                s = tl.reshape(tl.broadcast_to(token[:, None], (R, PARTS)), (SIDE,))
            tl.store(token_ptr + rows, s, mask=row_mask & (i == 0))
            factor = tl.div_rn(factor, s)
        write_tiles(
            y, y2, factor, y_ptr, token_ptr, offset_ptr, rows, row_mask & (i == 0), wide * n + inside, at2, mask, mask2, MODE,
            SCALE, LOW, HIGH, FP8, x_ptr.dtype.element_ty, PTX, R, PARTS, A2,
        )


def supports(x: Tensor, up: Tensor | None, code: torch.dtype | None) -> str | None:
    """None, or why these operands cannot be transformed here."""
    if x.dim() != 2:
        return f"x is a matrix, not {list(x.shape)}"
    n = x.shape[1]
    plan = best_tiling(n)
    checks = (
        (x.dtype in DTYPES, f"x is one of {DTYPES}, not {x.dtype}"),
        (not isinstance(plan, str), str(plan)),
        (x.stride(1) == 1 or n == 1, "rows of x are contiguous"),
        (up is None or (up.shape == x.shape and up.dtype == x.dtype and (up.stride(1) == 1 or n == 1)), "up is like x"),
        (code in (None, torch.int8, torch.float8_e4m3fn), f"codes are int8 or float8_e4m3fn, not {code}"),
    )
    reason = next((why for ok, why in checks if not ok), None) or why_not_here(x, up)
    if reason is None and not isinstance(plan, str) and x.dtype == torch.float32 and x.device.type == "cuda":
        side = plan.R * plan.A1 + plan.A2 if plan.a > 1 else 0
        if 4 * (side**2 + plan.B**2) > FLOAT32_BYTES:
            reason = f"float32 matrices of width {n} do not fit into shared memory"
    return fp8_reason(x.device) if reason is None and code == torch.float8_e4m3fn else reason


def hadamard_quantize(
    x: Tensor, scale: Tensor | None = None, *, up: Tensor | None = None, code: torch.dtype | None = torch.int8,
    bits: int = 8, visual: Tensor | None = None, split: Tensor | None = None, plan: HadamardPlan | None = None,
    out: Tensor | None = None, num_warps: int | None = None, programs: int | None = None,
    num_stages: int | None = None,
) -> Transformed:
    """Transform and quantize: ``scale`` None is dynamic per token, ``code`` None leaves y in x's dtype.

    With ``up``, the input is silu(x) * up.  ``plan`` and what follows are for tuning.
    """
    reason = supports(x, up, code)
    if reason is None and (not 2 <= bits <= 8 or (bits != 8 and (scale is None or code != torch.int8))):
        reason = f"bits = {bits}: 2 to 8 for static int8 codes, else 8"
    if reason is not None:
        raise ValueError(f"hadamard_quantize: {reason}")
    m, n = x.shape
    dtype = code or x.dtype
    y = torch.empty(m, n, dtype=dtype, device=x.device) if out is None else out
    if y.shape != x.shape or y.dtype != dtype or not y.is_contiguous():
        raise ValueError(f"hadamard_quantize: out is {dtype} [{m}, {n}], contiguous; got {y.dtype} {list(y.shape)}")
    dynamic = code is not None and scale is None
    tokens = torch.empty(m, dtype=torch.float32, device=x.device) if dynamic else None
    rows = row_scale(scale, m, visual, split) if code is not None and scale is not None else None
    if m == 0:
        return Transformed(y, tokens)
    run(x, up, y, plan, rows, tokens, code, bits, num_warps, programs, num_stages)
    return Transformed(y, tokens)


def run(
    x: Tensor, up: Tensor | None, y: Tensor, plan: HadamardPlan | None, rows: RowScale | None, tokens: Tensor | None,
    code: torch.dtype | None, bits: int, num_warps: int | None, programs: int | None, num_stages: int | None,
    offsets: Tensor | None = None,
) -> None:
    """Fill y, now: by this file's launch where an option asks for it or the other kernel does not take the rows."""
    asked = any(option is not None for option in (plan, num_warps, programs, num_stages))
    if asked or in_warpgroups.why_not(x, y) is not None:
        p = plan or hadamard_plan(x.shape[1], x.device, x.dtype)
        launch(x, up, y, p, rows, tokens, code, bits, num_warps, programs, num_stages, offsets).run()
    else:
        in_warpgroups.launch(x if up is None else silu_multiply(x, up), y, rows, tokens, bits, offsets).run()


def launch(
    x: Tensor, up: Tensor | None, y: Tensor, plan: HadamardPlan, rows: RowScale | None = None, tokens: Tensor | None = None,
    code: torch.dtype | None = None, bits: int = 8, num_warps: int | None = None, programs: int | None = None,
    num_stages: int | None = None, offsets: Tensor | None = None,
) -> Launch:
    """Fill y, by the static scales ``rows``, or the dynamic ones that go to ``tokens``, or in x's dtype.

    With ``offsets``, codes are asymmetric, and a token's offset goes there.
    """
    t, (m, n) = plan.tiling, x.shape
    args = dict(
        x_ptr=x, up_ptr=x if up is None else up, outer_ptr=plan.outer, inner_ptr=plan.inner, y_ptr=y,
        scale_ptr=plan.outer if rows is None else rows.scale, row_ptr=plan.outer if rows is None else rows.rows,
        M=m, n=n, a=t.a, b=t.b, stride_x=x.stride(0), stride_up=0 if up is None else up.stride(0),
    )
    mode = (
        ASYMMETRIC if offsets is not None else DYNAMIC if tokens is not None else STATIC if rows is not None else FLOAT
    )
    constants = dict(
        SCALE=1 / (outer_factor(t) * math.sqrt(t.a * t.b)),  # as an argument, Inductor would make it float64
        GATED=up is not None, MODE=mode.value, KIND=ROW.value if rows is None else rows.kind, LOW=-(2.0 ** (bits - 1)),
        HIGH=2.0 ** (bits - 1) - 1, FP8=code == torch.float8_e4m3fn,
        PTX=has_inline_ptx(x.device) and x.dtype != torch.float32, B=t.B,
    )
    if tokens is None and programs is None and few(x, t):
        constants |= dict(WIDTH=t.A1 + t.A2, STEP=t.A2 or min(t.A1, 64), COLUMNS=min(t.B, COLUMNS))
        grid = (m, *slices(t))
        return Launch(hadamard_slices_kernel, grid, args, constants, ("y_ptr",), num_warps or 4, num_stages or 3)
    tile = (t.R * (t.A1 if t.a > 1 else 1) + t.A2) * t.B
    small = tile <= 8192
    # With one turn in shared memory, not two, two programs fit a multiprocessor, which is worth a third where A is in one
    # part; both gated operands are staged, and fit only so.
    stages = num_stages or (3 if small else 2 if up is None and t.A2 else 1)
    warps = num_warps or (4 if small else 8)
    programs = min(ceil_div(m, t.R), programs or multiprocessors(x.device) * (2 if not small else 4 if n > 2048 else 8))
    constants |= dict(OUTER=t.a > 1, A1=t.A1, A2=t.A2, R=t.R, PROGRAMS=programs)
    args |= dict(token_ptr=y if tokens is None else tokens, offset_ptr=y if offsets is None else offsets)
    written = ("y_ptr", "token_ptr", *(() if offsets is None else ("offset_ptr",)))
    return Launch(hadamard_quantize_kernel, (programs,), args, constants, written, warps, stages)
