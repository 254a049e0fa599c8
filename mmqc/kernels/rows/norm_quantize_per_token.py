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

# Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.rows.norm_quantize import Norm, load_tile, norm_tile
from mmqc.kernels.rows.quantize_per_token import ends, store_codes
from mmqc.kernels.shared.device_facts import why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, first_reason, rows_like
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
def load_part(
    x_ptr, residual_ptr, sum_ptr, order_ptr, first, width, A: tl.constexpr, B: tl.constexpr, ORDER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """The tiles of a part, the second one the first again where B is 0, and the sum of their squares."""
    at, mask = places(order_ptr, first, width, A, True, ORDER)
    a = load_tile(x_ptr, residual_ptr, sum_ptr, at, mask, HAS_RESIDUAL)
    b, total = a, tl.sum(a * a)
    if B:
        at, mask = places(order_ptr, first + A, width - A, B, False, ORDER)
        b = load_tile(x_ptr, residual_ptr, sum_ptr, at, mask, HAS_RESIDUAL)
        total += tl.sum(b * b)
    return a, b, total


@triton.jit
def write_part(
    a, b, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, first, width, before, P: tl.constexpr,
    BITS: tl.constexpr, LEAST: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ORDER: tl.constexpr, HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):
    """Codes, scale and offset of part P, whose scale is at least LEAST times the one before; returns the scale."""
    at, mask = places(order_ptr, first, width, A, True, ORDER)
    a = norm_tile(a, f, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, DTYPE, PTX)
    low, high = ends(a, width, A, True)
    if B:
        at, mask = places(order_ptr, first + A, width - A, B, False, ORDER)
        b = norm_tile(b, f, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, DTYPE, PTX)
        more = ends(b, width - A, B, False)
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
    x_ptr, residual_ptr, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, sum_ptr, D, W0, W1, W2, stride_x, stride_r,
    stride_q, EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    FIRST: tl.constexpr, ORDER: tl.constexpr, PTX: tl.constexpr, PARTS: tl.constexpr, BITS0: tl.constexpr, BITS1: tl.constexpr,
    BITS2: tl.constexpr, A0: tl.constexpr, B0: tl.constexpr, A1: tl.constexpr, B1: tl.constexpr, A2: tl.constexpr,
    B2: tl.constexpr,
):
    """One row: of each part a full tile A and the rest in B, or none."""
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    x_ptr, residual_ptr, sum_ptr = x_ptr + wide * stride_x, residual_ptr + wide * stride_r, sum_ptr + wide * D
    q_ptr, scale_ptr, offset_ptr = q_ptr + wide * stride_q, scale_ptr + wide * PARTS, offset_ptr + wide * PARTS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    a0, b0, total = load_part(x_ptr, residual_ptr, sum_ptr, order_ptr, 0, W0, A0, B0, ORDER, HAS_RESIDUAL)
    if PARTS > 1:
        a1, b1, more = load_part(x_ptr, residual_ptr, sum_ptr, order_ptr, W0, W1, A1, B1, ORDER, HAS_RESIDUAL)
        total += more
    if PARTS > 2:
        a2, b2, more = load_part(x_ptr, residual_ptr, sum_ptr, order_ptr, W0 + W1, W2, A2, B2, ORDER, HAS_RESIDUAL)
        total += more
    f = tl.rsqrt(total / D + EPS)
    s = write_part(
        a0, b0, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, 0, W0, 0.0, 0, BITS0, 1.0, A0, B0, ORDER,
        HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX,
    )
    if PARTS > 1:
        s = write_part(
            a1, b1, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, W0, W1, s, 1, BITS1,
            2.0 ** (BITS0 - BITS1 - 1), A1, B1, ORDER, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX,
        )
    if PARTS > 2:
        write_part(
            a2, b2, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, W0 + W1, W2, s, 2, BITS2,
            2.0 ** (BITS1 - BITS2 - 1), A2, B2, ORDER, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX,
        )


def tiles(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(A, B) of each part: the largest power of two in it, and the next one over what that leaves."""
    firsts = [1 << (width.bit_length() - 1) for width in widths]
    rests = [width - first for width, first in zip(widths, firsts, strict=True)]
    return [(a, 1 << (rest - 1).bit_length() if rest else 0) for a, rest in zip(firsts, rests, strict=True)]


def why_not(x: Tensor, norm: Norm, order: Tensor | None, widths: Sequence[int], bits: Sequence[int]) -> str | None:
    """None, or why these operands cannot be normalised and quantized here."""
    if reason := norm.why_not(x):
        return reason
    width = x.shape[1]
    checks = (
        (1 <= len(widths) <= 3 and len(bits) == len(widths) and sum(widths) == width and min(widths) > 0,
         f"one to three parts of {width} channels, not {list(widths)}"),
        (all(2 <= b <= 8 for b in bits), f"bits = {list(bits)}: 2 to 8"),
        (not norm.center, "a LayerNorm is not among its norms"),
        (order is None or (tuple(order.shape) == (width,) and order.dtype == torch.int64 and order.stride(0) == 1),
         f"order is int64 [{width}]"),
    )
    return first_reason(checks) or why_not_here(x, norm.gain, norm.bias, norm.residual, order)


def plan(
    x: Tensor, norm: Norm, order: Tensor | None, widths: Sequence[int], bits: Sequence[int], new: New | None = None
) -> Plan[tuple[Rows, Tensor | None]] | Refusal:
    """One launch, of a program a row, that fills codes, scales and offsets, and x + r where there is a residual."""
    if reason := why_not(x, norm, order, widths, bits):
        return Refusal(reason)
    (m, width), parts, new = x.shape, len(widths), new or rows_like(x)
    out = Rows.new(new, width, parts)
    total = None if norm.residual is None else new(width, x.dtype)
    pairs, spare = tiles(widths), 3 - parts
    sizes, b, ab = [*widths, *[0] * spare], [*bits, *[8] * spare], [*pairs, *[(1, 0)] * spare]
    args = norm.args(x, total) | dict(
        order_ptr=x if order is None else order, q_ptr=out.q, scale_ptr=out.scale, offset_ptr=out.offset, W0=sizes[0], W1=sizes[1],
        W2=sizes[2], stride_q=out.q.stride(0),
    )
    constants = norm.constants(x) | dict(
        ORDER=order is not None, PARTS=parts, BITS0=b[0], BITS1=b[1], BITS2=b[2], A0=ab[0][0], B0=ab[0][1], A1=ab[1][0],
        B1=ab[1][1], A2=ab[2][0], B2=ab[2][1],
    )
    warps = min(16, triton.next_power_of_2(-(-sum(map(sum, pairs)) // (32 * LANE))))
    written = ("q_ptr", "scale_ptr", "offset_ptr", *(() if total is None else ("sum_ptr",)))
    launch = Launch(norm_quantize_per_token_kernel, (m,), args, constants, written, warps, 1, block_rows=1)
    return Plan((launch,), (out, total))
