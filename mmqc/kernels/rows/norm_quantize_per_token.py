"""An RMSNorm and the per-token asymmetric quantization of one to three parts behind it, a row in registers.

    h = x + r                                       (optional residual; h is written out too)
    y = h / sqrt(mean(h²) + eps) [∘ g] [+ β]        (rounded as ops/norm_quantize_per_token.py says)
    q, s, o of part after part of y, or of y in the order that is given       (ops/quantize_per_token.py)

Shapes:  x, r, h [M, D] fp16 | bf16 | fp32   g, β [D] in any of these   order int64 [D]   q int8 [M, D]
         s, o float32 [M, P]   D <= 65,536
How:     the norm's sum does not depend on the order of the channels, so they are loaded in the order of the parts.  A part is one
         to three tiles of powers of two, all but the last of them full, as in quantize_per_token.py.
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
from mmqc.kernels.rows.quantize_per_token import LANE, LANE_OF_FEW, ends, store_codes, tiles_of
from mmqc.kernels.shared.device_facts import why_not_here
from mmqc.kernels.shared.early_start import await_inputs, starts_early
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, first_reason, rows_like, warps_of_row
from mmqc.kernels.shared.row_scale import Rows


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
    x_ptr, residual_ptr, sum_ptr, order_ptr, first, width, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    ORDER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):
    """The tiles of a part, the first one again for those of size 0, and the sum of their squares."""
    at, mask = places(order_ptr, first, width, A, True, ORDER)
    a = load_tile(x_ptr, residual_ptr, sum_ptr, at, mask, HAS_RESIDUAL)
    b, c, total = a, a, tl.sum(a * a)
    if B:
        at, mask = places(order_ptr, first + A, width - A, B, C > 0, ORDER)
        b = load_tile(x_ptr, residual_ptr, sum_ptr, at, mask, HAS_RESIDUAL)
        total += tl.sum(b * b)
    if C:
        at, mask = places(order_ptr, first + A + B, width - A - B, C, False, ORDER)
        c = load_tile(x_ptr, residual_ptr, sum_ptr, at, mask, HAS_RESIDUAL)
        total += tl.sum(c * c)
    return a, b, c, total


@triton.jit
def write_part(
    a, b, c, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, first, width, before, P: tl.constexpr,
    BITS: tl.constexpr, LEAST: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):
    """Codes, scale and offset of part P, whose scale is at least LEAST times the one before; returns the scale."""
    at, mask = places(order_ptr, first, width, A, True, ORDER)
    a = norm_tile(a, f, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, DTYPE, PTX)
    low, high = ends(a, width, A, True)
    if B:
        at, mask = places(order_ptr, first + A, width - A, B, C > 0, ORDER)
        b = norm_tile(b, f, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, DTYPE, PTX)
        more = ends(b, width - A, B, C > 0)
        low, high = tl.minimum(low, more[0]), tl.maximum(high, more[1])
    if C:
        at, mask = places(order_ptr, first + A + B, width - A - B, C, False, ORDER)
        c = norm_tile(c, f, gain_ptr, bias_ptr, at, mask, HAS_GAIN, HAS_BIAS, FIRST, DTYPE, PTX)
        more = ends(c, width - A - B, C, False)
        low, high = tl.minimum(low, more[0]), tl.maximum(high, more[1])
    s = tl.div_rn(high - low, 2.0**BITS - 1.0)
    # one channel is both ends; their difference, fused with the products behind y, is a rounding error
    if A == 1 and not B:
        s = low * 0.0
    if P:
        s = tl.maximum(s, before * LEAST)
    store_codes(q_ptr, a, first, width, low, s, BITS, A, True)
    if B:
        store_codes(q_ptr, b, first + A, width - A, low, s, BITS, B, C > 0)
    if C:
        store_codes(q_ptr, c, first + A + B, width - A - B, low, s, BITS, C, False)
    tl.store(scale_ptr + P, s)
    tl.store(offset_ptr + P, low + s * 2.0 ** (BITS - 1))
    return s


@triton.jit
def norm_quantize_per_token_kernel(
    x_ptr, residual_ptr, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, sum_ptr, D, W0, W1, W2, stride_x, stride_r,
    stride_q, EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    FIRST: tl.constexpr, ORDER: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr, BITS0: tl.constexpr,
    BITS1: tl.constexpr, BITS2: tl.constexpr, A0: tl.constexpr, B0: tl.constexpr, C0: tl.constexpr, A1: tl.constexpr,
    B1: tl.constexpr, C1: tl.constexpr, A2: tl.constexpr, B2: tl.constexpr, C2: tl.constexpr,
):
    """One row: of each part a full tile A and the rest in B, or in B and C, or none."""
    if EARLY:
        await_inputs()
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    x_ptr, residual_ptr, sum_ptr = x_ptr + wide * stride_x, residual_ptr + wide * stride_r, sum_ptr + wide * D
    q_ptr, scale_ptr, offset_ptr = q_ptr + wide * stride_q, scale_ptr + wide * PARTS, offset_ptr + wide * PARTS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    a0, b0, c0, total = load_part(x_ptr, residual_ptr, sum_ptr, order_ptr, 0, W0, A0, B0, C0, ORDER, HAS_RESIDUAL)
    if PARTS > 1:
        a1, b1, c1, more = load_part(x_ptr, residual_ptr, sum_ptr, order_ptr, W0, W1, A1, B1, C1, ORDER, HAS_RESIDUAL)
        total += more
    if PARTS > 2:
        a2, b2, c2, more = load_part(x_ptr, residual_ptr, sum_ptr, order_ptr, W0 + W1, W2, A2, B2, C2, ORDER, HAS_RESIDUAL)
        total += more
    f = tl.rsqrt(total / D + EPS)
    s = write_part(
        a0, b0, c0, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, 0, W0, 0.0, 0, BITS0, 1.0, A0, B0, C0,
        ORDER, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX,
    )
    if PARTS > 1:
        s = write_part(
            a1, b1, c1, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, W0, W1, s, 1, BITS1,
            2.0 ** (BITS0 - BITS1 - 1), A1, B1, C1, ORDER, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX,
        )
    if PARTS > 2:
        write_part(
            a2, b2, c2, f, gain_ptr, bias_ptr, order_ptr, q_ptr, scale_ptr, offset_ptr, W0 + W1, W2, s, 2, BITS2,
            2.0 ** (BITS1 - BITS2 - 1), A2, B2, C2, ORDER, HAS_GAIN, HAS_BIAS, FIRST, dtype, PTX,
        )


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
    sizes, spare = [tiles_of(width) for width in widths], 3 - parts
    w, b, abc = [*widths, *[0] * spare], [*bits, *[8] * spare], [*sizes, *[(1, 0, 0)] * spare]
    args = norm.args(x, total) | dict(
        order_ptr=x if order is None else order, q_ptr=out.q, scale_ptr=out.scale, offset_ptr=out.offset, W0=w[0], W1=w[1], W2=w[2],
        stride_q=out.q.stride(0),
    )
    constants = norm.constants(x) | dict(
        ORDER=order is not None, EARLY=starts_early(x.device, m), PARTS=parts, BITS0=b[0], BITS1=b[1], BITS2=b[2],
        **{f"{tile}{part}": size for part, tiles in enumerate(abc) for tile, size in zip("ABC", tiles, strict=True)},
    )
    written = ("q_ptr", "scale_ptr", "offset_ptr", *(() if total is None else ("sum_ptr",)))
    warps = warps_of_row(m, sum(map(sum, sizes)), LANE, LANE_OF_FEW)
    early = constants["EARLY"]
    launch = Launch(norm_quantize_per_token_kernel, (m,), args, constants, written, warps, 1, block_rows=1, early=early)
    return Plan((launch,), (out, total))
