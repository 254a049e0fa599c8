"""A norm and quantization in one pass, a row in registers.

    h = x + r                                       (optional residual; h is written out too)
    y = h / sqrt(mean(h²) + eps) [∘ g] [+ β]        (norm.py; with ``center`` h less its mean; rounded as ops/norm_quantize.py)
    q = clamp(round(y / s(m)))                      static: row_scale.py
    s(m) = max|y[m]| / 127 (fp8: / 448)             dynamic: x_scale is None, and s is returned

Shapes:  x, r, h [M, D] fp16 | bf16 | fp32   g, β [D]   q [M, D] int8 | fp8e4nv   s float32 [M]   D <= 65,536
Bytes:   one read and one write of every element; bandwidth-bound.
Arch:    Ampere and newer; fp8 from compute capability 8.9.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.  Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import fp8_reason, has_inline_ptx, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.quantize_codes import quantize_tile, round_tile, token_scale
from mmqc.kernels.shared.row_scale import ROW, RowScale, row_scale, row_scale_tile

MAX_WIDTH = 65_536
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CODES = (torch.int8, torch.float8_e4m3fn)
LANES = 2048  # channels of a warp in the first part


class Norm(NamedTuple):
    """What stands in front of the quantization; with ``round_first`` y is rounded in front of the gain as well."""

    eps: float
    gain: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    round_first: bool = False
    center: bool = False


class Normed(NamedTuple):
    """Codes, the scales of a dynamic quantization, x + r where a residual was given."""

    q: Tensor
    scale: Tensor | None
    residual: Tensor | None


@triton.jit
def load_part(x_ptr, residual_ptr, sum_ptr, at, mask, HAS_RESIDUAL: tl.constexpr):
    """H in float32, written out where it is a sum."""
    h = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        total = h.to(tl.float32) + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        h = total.to(h.dtype)  # what the next layer will read
        tl.store(sum_ptr + at, h, mask=mask)
    return h.to(tl.float32)


@triton.jit
def norm_part(
    h, factor, gain_ptr, bias_ptr, at, mask, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, FIRST: tl.constexpr,
    DTYPE: tl.constexpr, PTX: tl.constexpr,
):
    """Y of a part of a row, rounded to DTYPE; FIRST: after every step."""
    y = h * factor
    if HAS_GAIN:
        if FIRST:
            y = round_tile(y, DTYPE, PTX)
        y = y * tl.load(gain_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        if FIRST:
            y = round_tile(y, DTYPE, PTX)
        y = y + tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return round_tile(y, DTYPE, PTX)


@triton.jit
def load_row(
    x_ptr, residual_ptr, sum_ptr, D, HAS_RESIDUAL: tl.constexpr, CENTER: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """H, CENTER: less its mean, in two parts, the second one the first again where REST is 0; the sum of its squares."""
    at = tl.arange(0, BLOCK)
    a = load_part(x_ptr, residual_ptr, sum_ptr, at, at < D, HAS_RESIDUAL)
    b = a
    if REST > 0:
        at2 = BLOCK + tl.arange(0, REST)
        b = load_part(x_ptr, residual_ptr, sum_ptr, at2, at2 < D, HAS_RESIDUAL)
    if CENTER:
        mean = tl.sum(a)
        if REST > 0:
            mean += tl.sum(b)
            b = tl.where(at2 < D, b - mean / D, 0.0)
        a = tl.where(at < D, a - mean / D, 0.0)
    total = tl.sum(a * a)
    if REST > 0:
        total += tl.sum(b * b)
    return a, b, total


@triton.jit
def norm_quantize_kernel(
    x_ptr, residual_ptr, gain_ptr, bias_ptr, q_ptr, sum_ptr, scale_ptr, row_ptr, token_ptr, M, D, stride_x, stride_r,
    EPS: tl.constexpr, KIND: tl.constexpr, DYNAMIC: tl.constexpr, CENTER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FP8: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):
    """One row, in two parts where one would be mostly mask: 1,280 = 1,024 + 256."""
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    x_ptr, residual_ptr = x_ptr + wide * stride_x, residual_ptr + wide * stride_r
    sum_ptr, q_ptr = sum_ptr + wide * D, q_ptr + wide * D
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    s = 1.0
    if not DYNAMIC:  # arrives with the row
        one = row + tl.zeros((1,), tl.int32)
        s = tl.max(row_scale_tile(scale_ptr, row_ptr, one, one < M, KIND))
    h, h2, total = load_row(x_ptr, residual_ptr, sum_ptr, D, HAS_RESIDUAL, CENTER, BLOCK, REST)
    factor = tl.rsqrt(total / D + EPS)
    at = tl.arange(0, BLOCK)
    mask = at < D
    y = norm_part(h, factor, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX)
    if REST > 0:
        at2 = BLOCK + tl.arange(0, REST)
        mask2 = at2 < D
        y2 = norm_part(h2, factor, gain_ptr, bias_ptr, at2, mask2, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX)
    if DYNAMIC:
        largest = tl.max(tl.abs(y))
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(y2)))
        s = token_scale(largest, FP8)
        tl.store(token_ptr + row, s)
    tl.store(q_ptr + at, quantize_tile(y, s, LOW, HIGH, FP8), mask=mask)
    if REST > 0:
        tl.store(q_ptr + at2, quantize_tile(y2, s, LOW, HIGH, FP8), mask=mask2)


def parts(width: int) -> tuple[int, int]:
    """Sizes of the two parts of a row, powers of two; 0 for no second one."""
    whole = int(triton.next_power_of_2(width))
    rest = int(triton.next_power_of_2(max(width - whole // 2, 1)))
    return (whole // 2, rest) if 256 <= rest < whole // 2 else (whole, 0)


def supports(x: Tensor, norm: Norm, code: torch.dtype) -> str | None:
    """None, or why these operands cannot be normalised here."""
    if len(x.shape) != 2:
        return f"x is a matrix, not {list(x.shape)}"
    width, r, vectors = x.shape[1], norm.residual, [v for v in (norm.gain, norm.bias) if v is not None]
    checks = (
        (x.dtype in DTYPES, f"x is one of {DTYPES}, not {x.dtype}"),
        (1 <= width <= MAX_WIDTH, f"a row of {width} does not fit one program: 1 to {MAX_WIDTH}"),
        (x.stride(1) == 1 or width == 1, "rows of x are contiguous"),
        (all(v.dtype in DTYPES and tuple(v.shape) == (width,) and v.stride(0) == 1 for v in vectors),
         f"gain and bias are [{width}], one of {DTYPES}"),
        (not norm.round_first or all(v.dtype == x.dtype for v in vectors), "gain and bias behind a rounding are like x"),
        (r is None or (r.shape == x.shape and r.dtype == x.dtype and (r.stride(1) == 1 or width == 1)), "residual is like x"),
        (code in CODES, f"codes are one of {CODES}, not {code}"),
    )
    reason = next((why for ok, why in checks if not ok), None) or why_not_here(x, norm.gain, norm.bias, r)
    return fp8_reason(x.device) if reason is None and code != torch.int8 else reason


def norm_quantize(
    x: Tensor, norm: Norm, scale: Tensor | None = None, *, visual: Tensor | None = None, split: Tensor | None = None,
    bits: int = 8, code: torch.dtype = torch.int8, out: Tensor | None = None, num_warps: int | None = None,
) -> Normed:
    """Normalise and quantize; ``scale`` None quantizes every token by its own largest entry; ``num_warps`` is for tuning."""
    reason = supports(x, norm, code)
    if reason is None and (not 2 <= bits <= 8 or (scale is None and bits != 8)):
        reason = f"bits = {bits}: 2 to 8, and 8 where the scale is dynamic"
    if reason is not None:
        raise ValueError(f"norm_quantize: {reason}")
    m, width = x.shape
    q = torch.empty(m, width, dtype=code, device=x.device) if out is None else out
    if q.shape != x.shape or q.dtype != code or not q.is_contiguous():
        raise ValueError(f"norm_quantize: out is {code} [{m}, {width}], contiguous; got {q.dtype} {list(q.shape)}")
    total = None if norm.residual is None else torch.empty(m, width, dtype=x.dtype, device=x.device)
    tokens = torch.empty(m, dtype=torch.float32, device=x.device) if scale is None else None
    rows = row_scale(scale, m, visual, split) if scale is not None else None
    if m:
        launch(x, norm, q, total, rows, tokens, bits, num_warps).run()
    return Normed(q, tokens, total)


def launch(
    x: Tensor, norm: Norm, q: Tensor, total: Tensor | None, rows: RowScale | None, tokens: Tensor | None = None,
    bits: int = 8, num_warps: int | None = None,
) -> Launch:
    """Fill ``q``, ``total`` with x + r, and ``tokens`` with scales where ``rows`` gives none."""
    (m, width), r = x.shape, norm.residual
    scale = tokens if rows is None else rows.scale
    block, rest = parts(width)
    args = dict(
        x_ptr=x, residual_ptr=x if r is None else r, gain_ptr=x if norm.gain is None else norm.gain,
        bias_ptr=x if norm.bias is None else norm.bias, q_ptr=q, sum_ptr=x if total is None else total, scale_ptr=scale,
        row_ptr=tokens if rows is None else rows.rows, token_ptr=x if tokens is None else tokens, M=m, D=width,
        stride_x=x.stride(0), stride_r=0 if r is None else r.stride(0),
    )
    constants = dict(
        EPS=norm.eps, KIND=ROW.value if rows is None else rows.kind, DYNAMIC=rows is None, CENTER=norm.center,
        HAS_RESIDUAL=r is not None, HAS_GAIN=norm.gain is not None, HAS_BIAS=norm.bias is not None,
        FIRST=norm.round_first, LOW=-(2.0 ** (bits - 1)), HIGH=2.0 ** (bits - 1) - 1, FP8=q.dtype != torch.int8,
        PTX=has_inline_ptx(x.device), BLOCK=block, REST=rest,
    )
    warps = num_warps or max(1, min(16, block // LANES))
    optional = {"sum_ptr": total, "token_ptr": tokens}
    written = ("q_ptr", *(name for name, t in optional.items() if t is not None))
    return Launch(norm_quantize_kernel, (m,), args, constants, written, warps, 1, block_rows=1)
