"""Visual keys or values to words (ops/kv_pack.py): the range of every channel, then one pass that gathers, rounds and packs.

    ranges   scale, offset of a channel over the first count[b] of order[b]          (by "channel")
    pack     round(clamp((x[order[n]] - a) / s)) of 64 tokens, the P = 8/b of a byte added up   (by "token" with its own range)

Shapes:  those of the op; x [B, H, L, D] with contiguous channels, D to 256
Exact:   the codes of the reference: IEEE division, halves to even, no contraction of products and sums.
Why:     the tokens are gathered from where the projection left them, and nothing but words is written.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.kv.kv_words import ROUND
from mmqc.kernels.shared.device_facts import ceil_div, why_not_here
from mmqc.kernels.shared.plan import Refusal
from mmqc.ops.kv_words import tokens_per_word, words_for


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
):
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
    x_ptr, order_ptr, count_ptr, scale_ptr, offset_ptr, bytes_ptr, heads, tokens, tokens_all, shrink, stride_b, stride_h,
    stride_l, BITS: tl.constexpr, PER_TOKEN: tl.constexpr, TRANSPOSED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BN: tl.constexpr,
):
    """The bytes of BN tokens of one head; by token, their scales and offsets too."""
    n, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, DP)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    P: tl.constexpr = 8 // BITS
    row = b * heads + h
    exists = n < tl.minimum(tl.load(count_ptr + b), tokens)
    place = tl.load(order_ptr + b * tokens + n, mask=exists, other=0)
    inside = exists[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + b * stride_b + h * stride_h + place[:, None] * stride_l + d[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    if PER_TOKEN:
        low = tl.min(tl.where(inside, x, float("inf")), 1)
        scale, offset = scale_tile(low, tl.max(tl.where(inside, x, float("-inf")), 1), shrink, BITS)
        tl.store(scale_ptr + row * tokens_all + n, scale, mask=n < tokens_all)
        tl.store(offset_ptr + row * tokens_all + n, offset, mask=n < tokens_all)
        scale, offset = scale[:, None], offset[:, None]
    else:
        scale = tl.load(scale_ptr + row * D + d, mask=d < D, other=1.0)[None, :]
        offset = tl.load(offset_ptr + row * D + d, mask=d < D, other=0.0)[None, :]
    u = tl.div_rn(x - offset, tl.broadcast_to(scale, (BN, DP)))
    u = tl.minimum(tl.maximum(u, 0.0), (1 << BITS) - 1.0)
    u = tl.where(inside, (u + ROUND).to(tl.int32, bitcast=True) & ((1 << BITS) - 1), 0)
    shifts = BITS * tl.arange(0, P)
    if TRANSPOSED:
        packed = tl.sum(u.reshape(BN, DP // P, P) << shifts[None, None, :], 2) ^ 128
        line = tl.arange(0, DP // P)
        at = (row * (D // P) + line)[None, :] * tokens_all + n[:, None]
        stored = (n < tokens_all)[:, None] & (line < D // P)[None, :]
    else:
        packed = tl.sum(u.reshape(BN // P, P, DP) << shifts[None, :, None], 1) ^ 128
        line = tl.program_id(0) * (BN // P) + tl.arange(0, BN // P)
        at = (row * (tokens_all // P) + line)[:, None] * D + d[None, :]
        stored = (line < tokens_all // P)[:, None] & (d < D)[None, :]
    tl.store(bytes_ptr + at, packed.to(tl.int8), mask=stored)


def why_not_keys(dtype: torch.dtype, width: int) -> str | None:
    """None, or why heads of ``width`` channels in ``dtype`` cannot be packed."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"x is fp16, bf16 or fp32, not {dtype}"
    return None if width <= 256 else f"channels are 256 at most, not {width}"


def why_not_layout(x: Tensor, order: Tensor) -> str | None:
    """None, or why tokens that lie so cannot be gathered."""
    if x.stride(3) != 1:
        return "channels are contiguous"
    if not order.is_contiguous() or order.dtype != torch.int64:
        return "order is contiguous int64"
    return why_not_keys(x.dtype, x.shape[3])


def why_not(x: Tensor, order: Tensor, count: Tensor, by: str) -> str | None:
    """None, or why these operands cannot be packed here."""
    if by not in ("channel", "token"):
        return f"a range by {by!r} is found by the reference"
    return why_not_layout(x, order) or why_not_here(x, order, count)


def kv_pack(
    x: Tensor, order: Tensor, count: Tensor, bits: int, by: str, shrink: float, transposed: bool
) -> tuple[Tensor, Tensor, Tensor] | Refusal:
    """(words, scale, offset) of the op, or why it is not had here."""
    if reason := why_not(x, order, count, by):
        return Refusal(reason)
    batch, heads, _, d = x.shape
    tokens, rows = order.shape[1], words_for(order.shape[1], bits)
    room = rows * tokens_per_word(bits)
    words = torch.empty((batch, heads, *((d, rows) if transposed else (rows, d))), dtype=torch.int16, device=x.device)
    shape = (batch, heads, room, 1) if by == "token" else (batch, heads, 1, d)
    scale, offset = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
    place = (heads, tokens)
    strides, half = x.stride()[:3], shrink / 2
    if by == "channel":
        kv_range_kernel[(ceil_div(d, 32), heads, batch)](
            x, order, count, scale, offset, *place, half, *strides, BITS=bits, D=d, BD=32, BN=128, enable_fp_fusion=False,
        )
    if room:
        kv_pack_kernel[(ceil_div(room, 64), heads, batch)](
            x, order, count, scale, offset, words.view(torch.int8), *place, room, half, *strides, BITS=bits,
            PER_TOKEN=by == "token", TRANSPOSED=transposed, D=d, DP=max(16, 1 << (d - 1).bit_length()), BN=64,
            enable_fp_fusion=False,
        )
    return words, scale, offset
