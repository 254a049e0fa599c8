"""An RMSNorm and the per-token asymmetric quantization of one to three parts behind it, a row in registers.

    h = x + r                                       (optional residual; h is written out too)
    y = h / sqrt(mean(h²) + eps) [∘ g] [+ β]        (rounded as ops/norm_quantize_per_token.py says)
    q, s, o of part after part of y, or of y in the order that is given       (ops/quantize_per_token.py)

Shapes:  x, r, h [M, D] fp16 | bf16 | fp32   g, β [D] in any of these   order int64 [D]   q int8 [M, D]
         s, o float32 [M, P]   D <= 65,536
How:     the norm's sum does not depend on the order of the channels, so they are loaded in the order of the parts.  A part is two
         tiles, the first of them as large as a power of two fits, as in quantize_per_token.py.
Bytes:   3 D a token in 16 bits, 7 D with a residual; one by one, sum and norm in one pass and the quantization in another, 7 D and
         11 D.
Arch:    Ampere and newer.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.  Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.rows.norm_quantize import Norm, norm_part
from mmqc.kernels.rows.quantize_per_token import DTYPES, MAX_WIDTH, ends, store_codes
from mmqc.kernels.shared.device_facts import has_inline_ptx, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import Rows

LANE = 64  # channels of a lane, at most: sums, gains and order are in registers beside them


@triton.jit
def places(order_ptr, first, width, BLOCK: tl.constexpr, FULL: tl.constexpr, ORDER: tl.constexpr):
    """The channels of a tile, and which of them there are."""
    at = tl.arange(0, BLOCK)
    mask = at < (BLOCK if FULL else width)
    if ORDER:
        at = tl.load(order_ptr + first + at, mask=mask, other=0).to(tl.int32)
    else:
        at = first + at
    return at, mask


@triton.jit
def load_tile(
    x_ptr, r_ptr, sum_ptr, order_ptr, first, width, BLOCK: tl.constexpr, FULL: tl.constexpr, ORDER: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """H as float32, zeros behind it; written out where it is a sum."""
    at, mask = places(order_ptr, first, width, BLOCK, FULL, ORDER)
    h = tl.load(x_ptr + at, mask=mask, other=0.0)
    if RESIDUAL:
        h = (h.to(tl.float32) + tl.load(r_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(sum_ptr + at, h, mask=mask)
    return h.to(tl.float32)


@triton.jit
def norm_tile(
    h, factor, gain_ptr, bias_ptr, order_ptr, first, width, BLOCK: tl.constexpr, FULL: tl.constexpr, ORDER: tl.constexpr,
    GAIN: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):
    """Y, rounded to DTYPE; FIRST: after every step."""
    at, mask = places(order_ptr, first, width, BLOCK, FULL, ORDER)
    return norm_part(h, factor, gain_ptr, bias_ptr, at, mask, GAIN, BIAS, FIRST, DTYPE, PTX)


@triton.jit
def load_part(
    x_ptr, r_ptr, sum_ptr, order_ptr, first, width, A: tl.constexpr, B: tl.constexpr, ORDER: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """The tiles of a part, the second one the first again where B is 0, and the sum of their squares."""
    a = load_tile(x_ptr, r_ptr, sum_ptr, order_ptr, first, width, A, True, ORDER, RESIDUAL)
    b, total = a, tl.sum(a * a)
    if B:
        b = load_tile(x_ptr, r_ptr, sum_ptr, order_ptr, first + A, width - A, B, False, ORDER, RESIDUAL)
        total += tl.sum(b * b)
    return a, b, total


@triton.jit
def write_part(
    a, b, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, first, width, before, P: tl.constexpr,
    BITS: tl.constexpr, LEAST: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ORDER: tl.constexpr, GAIN: tl.constexpr,
    BIAS: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):
    """Codes, scale and offset of part P, whose scale is at least LEAST times the one before; returns the scale."""
    a = norm_tile(a, f, gain_ptr, bias_ptr, order_ptr, first, width, A, True, ORDER, GAIN, BIAS, FIRST, DTYPE, PTX)
    low, high = ends(a, width, A, True)
    if B:
        rest, at = width - A, first + A
        b = norm_tile(b, f, gain_ptr, bias_ptr, order_ptr, at, rest, B, False, ORDER, GAIN, BIAS, FIRST, DTYPE, PTX)
        more = ends(b, rest, B, False)
        low, high = tl.minimum(low, more[0]), tl.maximum(high, more[1])
    s = tl.div_rn(high - low, 2.0**BITS - 1.0)
    # one channel is both ends; their difference, fused with the products behind y, is a rounding error
    if A == 1 and not B:
        s = low * 0.0
    if P:
        s = tl.maximum(s, before * LEAST)
    store_codes(q_ptr, a, first, width, low, s, BITS, A, True)
    if B:
        store_codes(q_ptr, b, first + A, width - A, low, s, BITS, B, False)
    tl.store(scale_ptr + P, s)
    tl.store(offset_ptr + P, low + s * 2.0 ** (BITS - 1))
    return s


@triton.jit
def norm_quantize_per_token_kernel(
    x_ptr, r_ptr, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, sum_ptr, D, W0, W1, W2, stride_x, stride_r,
    stride_q, EPS: tl.constexpr, RESIDUAL: tl.constexpr, GAIN: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr,
    ORDER: tl.constexpr, PTX: tl.constexpr, PARTS: tl.constexpr, BITS0: tl.constexpr, BITS1: tl.constexpr,
    BITS2: tl.constexpr, A0: tl.constexpr, B0: tl.constexpr, A1: tl.constexpr, B1: tl.constexpr, A2: tl.constexpr,
    B2: tl.constexpr,
):
    """One row: of each part a full tile A and the rest in B, or none."""
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    x_ptr, r_ptr, sum_ptr = x_ptr + wide * stride_x, r_ptr + wide * stride_r, sum_ptr + wide * D
    q_ptr, scale_ptr, offset_ptr = q_ptr + wide * stride_q, scale_ptr + wide * PARTS, offset_ptr + wide * PARTS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    a0, b0, total = load_part(x_ptr, r_ptr, sum_ptr, order_ptr, 0, W0, A0, B0, ORDER, RESIDUAL)
    if PARTS > 1:
        a1, b1, more = load_part(x_ptr, r_ptr, sum_ptr, order_ptr, W0, W1, A1, B1, ORDER, RESIDUAL)
        total += more
    if PARTS > 2:
        a2, b2, more = load_part(x_ptr, r_ptr, sum_ptr, order_ptr, W0 + W1, W2, A2, B2, ORDER, RESIDUAL)
        total += more
    f = tl.rsqrt(total / D + EPS)
    s = write_part(
        a0, b0, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, 0, W0, 0.0, 0, BITS0, 1.0, A0, B0, ORDER,
        GAIN, BIAS, FIRST, dtype, PTX,
    )
    if PARTS > 1:
        s = write_part(
            a1, b1, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, W0, W1, s, 1, BITS1,
            2.0 ** (BITS0 - BITS1 - 1), A1, B1, ORDER, GAIN, BIAS, FIRST, dtype, PTX,
        )
    if PARTS > 2:
        write_part(
            a2, b2, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, W0 + W1, W2, s, 2, BITS2,
            2.0 ** (BITS1 - BITS2 - 1), A2, B2, ORDER, GAIN, BIAS, FIRST, dtype, PTX,
        )


def supports(x: Tensor, norm: Norm, order: Tensor | None, widths: Sequence[int], bits: Sequence[int]) -> str | None:
    """None, or why these operands cannot be normalised and quantized here."""
    if len(x.shape) != 2:
        return f"x is a matrix, not {list(x.shape)}"
    width, r, vectors = x.shape[1], norm.residual, [v for v in (norm.gain, norm.bias) if v is not None]
    checks = (
        (x.dtype in DTYPES, f"x is one of {DTYPES}, not {x.dtype}"),
        (1 <= width <= MAX_WIDTH, f"a row of {width} does not fit one program: 1 to {MAX_WIDTH}"),
        (x.stride(1) == 1 or width == 1, "rows of x are contiguous"),
        (1 <= len(widths) <= 3 and len(bits) == len(widths) and sum(widths) == width and min(widths) > 0,
         f"one to three parts of {width} channels, not {list(widths)}"),
        (all(2 <= b <= 8 for b in bits), f"bits = {list(bits)}: 2 to 8"),
        (all(v.dtype in DTYPES and tuple(v.shape) == (width,) and v.stride(0) == 1 for v in vectors),
         f"gain and bias are [{width}], one of {DTYPES}"),
        (not norm.round_first or all(v.dtype == x.dtype for v in vectors), "gain and bias behind a rounding are like x"),
        (not norm.center, "a LayerNorm is not among its norms"),
        (r is None or (r.shape == x.shape and r.dtype == x.dtype and (r.stride(1) == 1 or width == 1)), "residual is like x"),
        (order is None or (tuple(order.shape) == (width,) and order.dtype == torch.int64 and order.stride(0) == 1),
         f"order is int64 [{width}]"),
    )
    reason = next((why for ok, why in checks if not ok), None)
    return reason or why_not_here(x, norm.gain, norm.bias, r, order)


def norm_quantize_per_token(
    x: Tensor, norm: Norm, widths: Sequence[int], bits: Sequence[int], *, order: Tensor | None = None,
    out: Rows | None = None, total: Tensor | None = None, num_warps: int | None = None,
) -> tuple[Rows, Tensor | None]:
    """Codes, scales and offsets of every row of x [M, D], and x + r where there is a residual."""
    reason = supports(x, norm, order, widths, bits)
    if reason is not None:
        raise ValueError(f"norm_quantize_per_token: {reason}")
    out = Rows.empty(x, len(widths)) if out is None else out
    if norm.residual is not None and total is None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        launch(x, norm, out, total, widths, bits, order, num_warps).run()
    return out, total


def tiles(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(A, B) of each part: the largest power of two in it, and the next one over what that leaves."""
    firsts = [1 << (width.bit_length() - 1) for width in widths]
    rests = [width - first for width, first in zip(widths, firsts, strict=True)]
    return [(a, 1 << (rest - 1).bit_length() if rest else 0) for a, rest in zip(firsts, rests, strict=True)]


def launch(
    x: Tensor, norm: Norm, out: Rows, total: Tensor | None, widths: Sequence[int], bits: Sequence[int],
    order: Tensor | None = None, num_warps: int | None = None,
) -> Launch:
    """Fill ``out``, and ``total`` with x + r."""
    m, width = x.shape
    pairs, parts = tiles(widths), len(widths)
    r, spare = norm.residual, 3 - parts
    sizes, b, ab = [*widths, *[0] * spare], [*bits, *[8] * spare], [*pairs, *[(1, 0)] * spare]
    args = dict(
        x_ptr=x, r_ptr=x if r is None else r, gain_ptr=x if norm.gain is None else norm.gain,
        bias_ptr=x if norm.bias is None else norm.bias, order_ptr=x if order is None else order, q_ptr=out.q,
        scale_ptr=out.scale, offset_ptr=out.offset, sum_ptr=x if total is None else total, D=width, W0=sizes[0], W1=sizes[1],
        W2=sizes[2], stride_x=x.stride(0), stride_r=0 if r is None else r.stride(0), stride_q=out.q.stride(0),
    )
    constants = dict(
        EPS=norm.eps, RESIDUAL=r is not None, GAIN=norm.gain is not None, BIAS=norm.bias is not None,
        FIRST=norm.round_first, ORDER=order is not None, PTX=has_inline_ptx(x.device), PARTS=parts,
        BITS0=b[0], BITS1=b[1], BITS2=b[2], A0=ab[0][0], B0=ab[0][1], A1=ab[1][0], B1=ab[1][1], A2=ab[2][0], B2=ab[2][1],
    )
    warps = num_warps or min(16, triton.next_power_of_2(-(-sum(map(sum, pairs)) // (32 * LANE))))
    written = ("q_ptr", "scale_ptr", "offset_ptr", *(() if total is None else ("sum_ptr",)))
    return Launch(norm_quantize_per_token_kernel, (m,), args, constants, written, warps, 1, block_rows=1)
