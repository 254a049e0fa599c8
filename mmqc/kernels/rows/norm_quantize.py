"""A norm and the static quantization behind it in one pass, a row in registers.

    h = x + r                                       (optional residual; h is written out too)
    y = h / sqrt(mean(h²) + eps) [∘ g] [+ β]        (norm.py; with ``center`` h less its mean; rounded as ops/norm_quantize.py)
    q = clamp(round(y / s(m)))                      (row_scale.py)

Shapes:  x, r, h [M, D] fp16 | bf16 | fp32   g, β [D]   q [M, D] int8 | fp8e4nv   D <= 65,536
Bytes:   one read and one write of every element; bandwidth-bound.
Arch:    Ampere and newer; fp8 from compute capability 8.9.
"""

# Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import fp8_reason, has_inline_ptx, why_not_here
from mmqc.kernels.shared.early_start import await_inputs, starts_early
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import ROW_DTYPES, New, Plan, Refusal, first_reason, rows_like, warps_of_row, why_not_rows
from mmqc.kernels.shared.quantize_codes import quantize_tile, round_tile
from mmqc.kernels.shared.row_scale import RowScale, row_scale_tile

CODES = (torch.int8, torch.float8_e4m3fn)
LANE, LANE_OF_FEW = 32, 8  # channels of a lane in the first part


class Norm(NamedTuple):
    """What stands in front of the quantization; with ``round_first`` y is rounded in front of the gain as well."""

    eps: float
    gain: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    round_first: bool = False
    center: bool = False

    def why_not(self, x: Tensor) -> str | None:
        """None, or why the rows of x cannot be normalised in a program each."""
        if reason := why_not_rows(x):
            return reason
        width, r, vectors = x.shape[1], self.residual, [v for v in (self.gain, self.bias) if v is not None]
        return first_reason((
            (all(v.dtype in ROW_DTYPES and tuple(v.shape) == (width,) and v.stride(0) == 1 for v in vectors),
             f"gain and bias are [{width}], one of {ROW_DTYPES}"),
            (not self.round_first or all(v.dtype == x.dtype for v in vectors), "gain and bias behind a rounding are like x"),
            (r is None or (r.shape == x.shape and r.dtype == x.dtype and (r.stride(1) == 1 or width == 1)), "residual is like x"),
        ))

    def args(self, x: Tensor, total: Tensor | None) -> dict[str, Any]:
        """Of a kernel that normalises x and writes ``total``, x + r."""
        r = self.residual
        return dict(
            x_ptr=x, residual_ptr=x if r is None else r, gain_ptr=x if self.gain is None else self.gain,
            bias_ptr=x if self.bias is None else self.bias, sum_ptr=x if total is None else total, D=x.shape[1],
            stride_x=x.stride(0), stride_r=0 if r is None else r.stride(0),
        )

    def constants(self, x: Tensor) -> dict[str, Any]:
        """The same kernel's."""
        return dict(
            EPS=self.eps, HAS_RESIDUAL=self.residual is not None, HAS_GAIN=self.gain is not None, HAS_BIAS=self.bias is not None,
            FIRST=self.round_first, PTX=has_inline_ptx(x.device),
        )


class Normed(NamedTuple):
    """Codes, and x + r where a residual was given."""

    q: Tensor
    total: Tensor | None


@triton.jit
def load_tile(x_ptr, residual_ptr, sum_ptr, at, mask, HAS_RESIDUAL: tl.constexpr):
    """H in float32, written out where it is a sum."""
    h = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        total = h.to(tl.float32) + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        h = total.to(h.dtype)  # what the next layer will read
        tl.store(sum_ptr + at, h, mask=mask)
    return h.to(tl.float32)


@triton.jit
def norm_tile(
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
    a = load_tile(x_ptr, residual_ptr, sum_ptr, at, at < D, HAS_RESIDUAL)
    b = a
    if REST > 0:
        at2 = BLOCK + tl.arange(0, REST)
        b = load_tile(x_ptr, residual_ptr, sum_ptr, at2, at2 < D, HAS_RESIDUAL)
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
    x_ptr, residual_ptr, gain_ptr, bias_ptr, q_ptr, sum_ptr, scale_ptr, row_ptr, M, D, stride_x, stride_r,
    EPS: tl.constexpr, KIND: tl.constexpr, CENTER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):
    """One row, in two parts where one would be mostly mask: 1,280 = 1,024 + 256."""
    if EARLY:
        await_inputs()
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    x_ptr, residual_ptr = x_ptr + wide * stride_x, residual_ptr + wide * stride_r
    sum_ptr, q_ptr = sum_ptr + wide * D, q_ptr + wide * D
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    one = row + tl.zeros((1,), tl.int32)
    s = tl.max(row_scale_tile(scale_ptr, row_ptr, one, one < M, KIND))  # arrives with the row
    h, h2, total = load_row(x_ptr, residual_ptr, sum_ptr, D, HAS_RESIDUAL, CENTER, BLOCK, REST)
    factor = tl.rsqrt(total / D + EPS)
    at = tl.arange(0, BLOCK)
    mask = at < D
    y = norm_tile(h, factor, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX)
    if REST > 0:
        at2 = BLOCK + tl.arange(0, REST)
        mask2 = at2 < D
        y2 = norm_tile(h2, factor, gain_ptr, bias_ptr, at2, mask2, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX)
    tl.store(q_ptr + at, quantize_tile(y, s, LOW, HIGH, FP8), mask=mask)
    if REST > 0:
        tl.store(q_ptr + at2, quantize_tile(y2, s, LOW, HIGH, FP8), mask=mask2)


def parts(width: int) -> tuple[int, int]:
    """Sizes of the two parts of a row, powers of two; 0 for no second one."""
    whole = int(triton.next_power_of_2(width))
    rest = int(triton.next_power_of_2(max(width - whole // 2, 1)))
    return (whole // 2, rest) if 256 <= rest < whole // 2 else (whole, 0)


def why_not(x: Tensor, norm: Norm, bits: int = 8, code: torch.dtype = torch.int8) -> str | None:
    """None, or why these operands cannot be normalised and quantized here."""
    checks = (
        (code in CODES, f"codes are one of {CODES}, not {code}"),
        (2 <= bits <= 8, f"bits = {bits}: 2 to 8"),
    )
    reason = norm.why_not(x) or first_reason(checks) or why_not_here(x, norm.gain, norm.bias, norm.residual)
    return fp8_reason(x.device) if reason is None and code != torch.int8 else reason


def plan(
    x: Tensor, norm: Norm, scales: RowScale, bits: int = 8, code: torch.dtype = torch.int8, new: New | None = None
) -> Plan[Normed] | Refusal:
    """One launch, of a program a row."""
    if reason := why_not(x, norm, bits, code):
        return Refusal(reason)
    (m, width), new = x.shape, new or rows_like(x)
    q, total = new(width, code), None if norm.residual is None else new(width, x.dtype)
    block, rest = parts(width)
    args = norm.args(x, total) | dict(q_ptr=q, scale_ptr=scales.scale, row_ptr=scales.rows, M=m)
    constants = norm.constants(x) | dict(
        KIND=scales.kind, CENTER=norm.center, LOW=-(2.0 ** (bits - 1)), HIGH=2.0 ** (bits - 1) - 1, FP8=code != torch.int8,
        EARLY=starts_early(x.device, m), BLOCK=block, REST=rest,
    )
    warps, written = warps_of_row(m, block, LANE, LANE_OF_FEW), ("q_ptr", *(() if total is None else ("sum_ptr",)))
    launch = Launch(norm_quantize_kernel, (m,), args, constants, written, warps, 1, block_rows=1, early=constants["EARLY"])
    return Plan((launch,), Normed(q, total))
