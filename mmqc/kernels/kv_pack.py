"""Visual keys or values to words (ops/kv_pack.py): the range of every channel, then one pass that gathers, rounds and packs.

    ranges   scale, offset of a channel over the first count[b] of order[b]          (by "channel")
    pack     word = or over t of  round(clamp((x[order[r P + t]] - a) / s)) << b t   (by "token" with the token's own range)

Shapes:  those of the op; x [B, H, L, D] with contiguous channels, D to 256
Exact:   the codes of the reference: IEEE division, halves to even, no contraction of products and sums.
Why:     the tokens are gathered from where the projection left them, and nothing but words is written.
Arch:    Ampere and newer.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.device_facts import ceil_div, why_not_here
from mmqc.ops.kv_words import tokens_per_word, words_for

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even


@triton.jit
def scale_tile(low, high, shrink, BITS: tl.constexpr):
    """(scale, offset) of a range narrowed about its centre; (1, low) where it is one value or nothing."""
    some = low <= high
    low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
    centre, half = (low + high) * 0.5, (high - low) * shrink
    wide = high > low
    step = tl.div_rn(2.0 * half, tl.full(half.shape, (1 << BITS) - 1, tl.float32))
    return tl.where(wide, step, 1.0), tl.where(wide, centre - half, low)


@triton.jit
def kv_range_kernel(
    x_ptr, order_ptr, count_ptr, scale_ptr, offset_ptr, heads, tokens, shrink, stride_b, stride_h, stride_l,
    BITS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scale and offset of BD channels of one head."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.minimum(tl.load(count_ptr + b), tokens)
    low, high = tl.full((BN, BD), float("inf"), tl.float32), tl.full((BN, BD), float("-inf"), tl.float32)
    for start in range(0, count, BN):
        n = start + tl.arange(0, BN)
        place = tl.load(order_ptr + b * tokens + n, mask=n < count, other=0)
        inside = (n < count)[:, None] & (d < D)[None, :]
        x = tl.load(
            x_ptr + b * stride_b + h * stride_h + place[:, None] * stride_l + d[None, :], mask=inside, other=0.0
        )
        x = x.to(tl.float32)
        low = tl.minimum(low, tl.where(inside, x, float("inf")))
        high = tl.maximum(high, tl.where(inside, x, float("-inf")))
    scale, offset = scale_tile(tl.min(low, 0), tl.max(high, 0), shrink, BITS)
    at = (b * heads + h) * D + d
    tl.store(scale_ptr + at, scale, mask=d < D)
    tl.store(offset_ptr + at, offset, mask=d < D)


@triton.jit
def kv_pack_kernel(
    x_ptr, order_ptr, count_ptr, scale_ptr, offset_ptr, words_ptr, heads, tokens, rows_all, shrink, stride_b, stride_h,
    stride_l, BITS: tl.constexpr, PER_TOKEN: tl.constexpr, TRANSPOSED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """R rows of words of one head; by token, their scales and offsets too."""
    r, d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, DP)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    PLANES: tl.constexpr = 16 // BITS
    row = b * heads + h
    count = tl.minimum(tl.load(count_ptr + b), tokens)
    words = tl.zeros((R, DP), tl.int32)
    if not PER_TOKEN:
        scale = tl.load(scale_ptr + row * D + d, mask=d < D, other=1.0)[None, :]
        offset = tl.load(offset_ptr + row * D + d, mask=d < D, other=0.0)[None, :]
    for t in tl.static_range(PLANES):
        n = r * PLANES + t
        exists = n < count
        place = tl.load(order_ptr + b * tokens + n, mask=exists, other=0)
        inside = exists[:, None] & (d < D)[None, :]
        x = tl.load(
            x_ptr + b * stride_b + h * stride_h + place[:, None] * stride_l + d[None, :], mask=inside, other=0.0
        )
        x = x.to(tl.float32)
        if PER_TOKEN:
            low = tl.min(tl.where(inside, x, float("inf")), 1)
            scale, offset = scale_tile(low, tl.max(tl.where(inside, x, float("-inf")), 1), shrink, BITS)
            tl.store(scale_ptr + row * rows_all * PLANES + n, scale, mask=r < rows_all)
            tl.store(offset_ptr + row * rows_all * PLANES + n, offset, mask=r < rows_all)
            scale, offset = scale[:, None], offset[:, None]
        u = tl.div_rn(x - offset, tl.broadcast_to(scale, (R, DP)))
        u = tl.minimum(tl.maximum(u, 0.0), (1 << BITS) - 1.0)
        u = (u + ROUND).to(tl.int32, bitcast=True) & ((1 << BITS) - 1)
        words = words | (tl.where(inside, u, 0) << (BITS * t))
    if TRANSPOSED:
        at = words_ptr + (row * D + d)[None, :] * rows_all + r[:, None]
    else:
        at = words_ptr + (row * rows_all + r)[:, None] * D + d[None, :]
    tl.store(at, words.to(tl.int16), mask=(r < rows_all)[:, None] & (d < D)[None, :])


def supports(x: Tensor, order: Tensor, count: Tensor, by: str) -> str | None:
    """None, or why these operands cannot be packed here."""
    checks = (
        (by in ("channel", "token"), f"a range by {by!r} is found by the reference"),
        (x.dtype in (torch.float16, torch.bfloat16, torch.float32), f"x is fp16, bf16 or fp32, not {x.dtype}"),
        (x.shape[3] <= 256 and x.stride(3) == 1, "channels are 256 at most, and contiguous"),
        (order.is_contiguous() and order.dtype == torch.int64, "order is contiguous int64"),
    )
    return next((why for ok, why in checks if not ok), None) or why_not_here(x, order, count)


def kv_pack(
    x: Tensor, order: Tensor, count: Tensor, bits: int, by: str, shrink: float, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(words, scale, offset) of the op."""
    reason = supports(x, order, count, by)
    if reason is not None:
        raise ValueError(f"kv_pack: {reason}")
    batch, heads, _, d = x.shape
    tokens, rows = order.shape[1], words_for(order.shape[1], bits)
    words = torch.empty((batch, heads, *((d, rows) if transposed else (rows, d))), dtype=torch.int16, device=x.device)
    shape = (batch, heads, rows * tokens_per_word(bits), 1) if by == "token" else (batch, heads, 1, d)
    scale, offset = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
    place = (heads, tokens)
    strides, half = x.stride()[:3], shrink / 2
    if by == "channel":
        kv_range_kernel[(ceil_div(d, 32), heads, batch)](
            x, order, count, scale, offset, *place, half, *strides, BITS=bits, D=d, BD=32, BN=128, enable_fp_fusion=False,
        )  # fmt: skip
    if rows:
        block = 8 if bits == 1 else 16
        kv_pack_kernel[(ceil_div(rows, block), heads, batch)](
            x, order, count, scale, offset, words, *place, rows, half, *strides, BITS=bits, PER_TOKEN=by == "token",
            TRANSPOSED=transposed, D=d, DP=max(16, 1 << (d - 1).bit_length()), R=block, enable_fp_fusion=False,
        )  # fmt: skip
    return words, scale, offset
