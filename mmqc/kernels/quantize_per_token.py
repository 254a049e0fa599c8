"""Per-token asymmetric quantization in two precisions, with an RMSNorm in front of it: a row in registers.

    y = x / sqrt(mean(x²) + eps)        (norm.py; only with ``eps``; rounded to x's dtype, as the module does)
    s = (max y - min y) / (2^b - 1)     q = round((y - min y) / s) - 2^(b-1)     o = min y + 2^(b-1) s
    for the first L channels with b = bits[0] and for the others with b = bits[1]         (ops/quantize_per_token.py)

Shapes:  x [M, D] fp16 | bf16 | fp32   low [M, L] int8 | fp8e4nv   high [M, D - L] int8 | fp16   s, o float32 [M, P]   D <= 65,536
Codes:   of 4 bits or fewer are exact in fp8e4nv, those of 8 bits in fp16: the tensor cores' float inputs (mixed_matmul.py).
Bytes:   one read and one write of every element; bandwidth-bound.
Arch:    Ampere and newer; fp8 from compute capability 8.9.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.device_facts import fp8_reason, why_not_here
from mmqc.kernels.launch import Launch
from mmqc.kernels.quantize_codes import divide_tile

MAX_WIDTH = 65_536
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = torch.float8_e4m3fn


class Parts(NamedTuple):
    """A quantized matrix: codes of the low and of the high part (None if there is one part), scales and offsets [M, P]."""

    low: Tensor
    high: Tensor | None
    scale: Tensor
    offset: Tensor


@triton.jit
def part_tile(y, inside, BITS: tl.constexpr):
    """Codes as float32, scale and offset of the entries ``inside`` of one row."""
    low = tl.min(tl.where(inside, y, float("inf")))
    high = tl.max(tl.where(inside, y, float("-inf")))
    s = tl.div_rn(high - low, 2.0**BITS - 1.0)
    s = tl.where(s > 0.0, s, 1.0)
    u = tl.minimum(tl.maximum(divide_tile(y - low, s), 0.0), 2.0**BITS - 1.0)
    # Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low byte: cheaper than a conversion.
    code = ((u + 12582912.0).to(tl.int32, bitcast=True) & 255) - 2 ** (BITS - 1)
    return code.to(tl.float32), s, low + s * 2.0 ** (BITS - 1)


@triton.jit
def quantize_per_token_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, offset_ptr, M, D, LOW, stride_x, stride_low, stride_high, eps,
    NORM: tl.constexpr, PARTS: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    y = tl.load(x_ptr + wide * stride_x + at, mask=at < D, other=0.0).to(tl.float32)
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y) / D + eps)
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    is_low = at < LOW
    code, s, o = part_tile(y, is_low, LOW_BITS)  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
    tl.store(low_ptr + wide * stride_low + at, code.to(low_ptr.dtype.element_ty), mask=is_low)
    tl.store(scale_ptr + row * PARTS, s)
    tl.store(offset_ptr + row * PARTS, o)
    if PARTS == 2:
        is_high = (at >= LOW) & (at < D)
        code, s, o = part_tile(y, is_high, HIGH_BITS)
        tl.store(high_ptr + wide * stride_high + (at - LOW), code.to(high_ptr.dtype.element_ty), mask=is_high)
        tl.store(scale_ptr + row * PARTS + 1, s)
        tl.store(offset_ptr + row * PARTS + 1, o)


def supports(x: Tensor, widths: Sequence[int], bits: Sequence[int], low_code: torch.dtype) -> str | None:
    """None, or why these operands cannot be quantized here."""
    if len(x.shape) != 2:
        return f"x is a matrix, not {list(x.shape)}"
    width = x.shape[1]
    checks = (
        (x.dtype in DTYPES, f"x is one of {DTYPES}, not {x.dtype}"),
        (1 <= width <= MAX_WIDTH, f"a row of {width} does not fit one program: 1 to {MAX_WIDTH}"),
        (x.stride(1) == 1 or width == 1, "rows of x are contiguous"),
        (len(widths) in (1, 2) and len(bits) == len(widths) and sum(widths) == width, f"one or two parts, not {list(widths)}"),
        (all(2 <= b <= 8 for b in bits), f"bits = {list(bits)}: 2 to 8"),
        (low_code in (torch.int8, FP8), f"low codes are int8 or float8_e4m3fn, not {low_code}"),
        (low_code != FP8 or bits[0] <= 4, f"codes of {bits[0]} bits are not exact in float8_e4m3fn"),
    )  # fmt: skip
    reason = next((why for ok, why in checks if not ok), None) or why_not_here(x)
    return fp8_reason(x.device) if reason is None and low_code == FP8 else reason


def quantize_per_token(
    x: Tensor, widths: Sequence[int], bits: Sequence[int], *, eps: float | None = None, low_code: torch.dtype = torch.int8,
    high_code: torch.dtype = torch.int8, out: Parts | None = None,
) -> Parts:  # fmt: skip
    """Quantize every row of x [M, D], part by part; with ``eps`` behind an RMSNorm of unit gain."""
    reason = supports(x, widths, bits, low_code)
    if reason is not None:
        raise ValueError(f"quantize_per_token: {reason}")
    m, parts = x.shape[0], len(widths)
    if out is None:
        new = torch.empty
        high = new(m, widths[1], dtype=high_code, device=x.device) if parts == 2 else None
        scale, offset = (new(m, parts, dtype=torch.float32, device=x.device) for _ in "so")
        out = Parts(new(m, widths[0], dtype=low_code, device=x.device), high, scale, offset)
    if m:
        launch(x, out, widths, bits, eps).run()
    return out


def launch(x: Tensor, out: Parts, widths: Sequence[int], bits: Sequence[int], eps: float | None = None) -> Launch:
    """Fill ``out``."""
    m, width = x.shape
    high = out.low if out.high is None else out.high
    block = max(16, triton.next_power_of_2(width))
    args = dict(
        x_ptr=x, low_ptr=out.low, high_ptr=high, scale_ptr=out.scale, offset_ptr=out.offset, M=m, D=width, LOW=widths[0],
        stride_x=x.stride(0), stride_low=out.low.stride(0), stride_high=high.stride(0), eps=eps or 0.0,
    )  # fmt: skip
    constants = dict(
        NORM=eps is not None, PARTS=len(widths), LOW_BITS=bits[0], HIGH_BITS=bits[-1], BLOCK=block
    )  # fmt: skip
    outputs = ("low_ptr", "high_ptr", "scale_ptr", "offset_ptr")
    warps = max(1, min(16, block // 1024))
    return Launch(quantize_per_token_kernel, (m,), args, constants, outputs, warps, 3, block_rows=1)
