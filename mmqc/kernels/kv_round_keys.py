"""Visual keys to words, with codes that keep the scores of the queries to come (ops/kv_round_keys.py).

    ranges   scale, offset of a channel, by kv_pack's kernel
    round    e = s u + a - x of BN tokens in registers;  for C channels at a time:  G = e H[:, C],  then channel by channel
             u_c <- round(clamp(u_c - G_c / (s_c H_cc), 0, 2^b - 1)),  G <- G + (change s_c) H[c, C];  then e in these channels

Shapes:  those of the op; x [B, H, L, D] with contiguous channels, D to 256
Why:     tokens do not depend on each other, and of the slope only the next C channels are ever needed: one product brings it up to
         date for all that changed since, where a rank-one update of all D for each channel would go through memory D times.
Exact:   ranges and nearest codes as kv_pack's kernel has them.  The slope is what the reference's is, but for the order of its
         float32 sums (products of three TF32 parts, about 2^-22): a code differs only where a step of the descent lies that near to
         the middle between two codes, and then what that token's descent does afterwards.
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
from mmqc.kernels.kv_pack import kv_range_kernel
from mmqc.kernels.kv_pack import why_not_layout as why_not_packed
from mmqc.ops.kv_round_keys import weighting
from mmqc.ops.kv_words import tokens_per_word, words_for

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even


@triton.jit
def nearest_tile(x, TOP: tl.constexpr):
    """The code next to x."""
    return (tl.minimum(tl.maximum(x, 0.0), TOP) + ROUND) - ROUND


@triton.jit
def descend_tile(u, slope, h_ptr, scale_ptr, first, D: tl.constexpr, C: tl.constexpr, TOP: tl.constexpr):
    """Codes u [BN, C] after one round over channels first ... first + C - 1, whose slope [BN, C] it was."""
    k = tl.arange(0, C)
    for j in range(C):
        c = first + j
        here = (k == j)[None, :]
        step = tl.load(scale_ptr + c, mask=c < D, other=1.0)
        curve = tl.load(h_ptr + c * D + c, mask=c < D, other=1.0)
        row = tl.load(h_ptr + c * D + first + k, mask=(first + k < D) & (c < D), other=0.0)
        u_c = tl.sum(tl.where(here, u, 0.0), 1)
        slope_c = tl.sum(tl.where(here, slope, 0.0), 1)
        better = nearest_tile(u_c - tl.div_rn(slope_c, tl.zeros_like(slope_c) + step * curve), TOP)
        slope += ((better - u_c) * step)[:, None] * row[None, :]
        u = tl.where(here, better[:, None], u)
    return u


@triton.jit
def kv_round_keys_kernel(
    x_ptr, order_ptr, count_ptr, h_ptr, scale_ptr, offset_ptr, bytes_ptr, heads, tokens, tokens_all, sweeps, stride_b, stride_h,
    stride_l, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The bytes of BN tokens of one head."""
    n, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, DP)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    P: tl.constexpr = 8 // BITS
    TOP: tl.constexpr = (1 << BITS) - 1.0
    BLOCKS: tl.constexpr = (D + C - 1) // C
    row = b * heads + h
    h_ptr, scale_ptr, offset_ptr = h_ptr + h * D * D, scale_ptr + row * D, offset_ptr + row * D
    exists = n < tl.minimum(tl.load(count_ptr + b), tokens)
    place = tl.load(order_ptr + b * tokens + n, mask=exists, other=0)
    inside = exists[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + b * stride_b + h * stride_h + place[:, None] * stride_l + d[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    scale = tl.load(scale_ptr + d, mask=d < D, other=1.0)[None, :]
    offset = tl.load(offset_ptr + d, mask=d < D, other=0.0)[None, :]
    u = tl.where(inside, nearest_tile(tl.div_rn(x - offset, tl.broadcast_to(scale, (BN, DP))), TOP), 0.0)
    e = tl.where(inside, u * scale + offset - x, 0.0)
    k, block = tl.arange(0, C), tl.arange(0, DP // C)
    for i in range(sweeps * BLOCKS):
        first = i % BLOCKS * C
        of_h = tl.load(h_ptr + d[:, None] * D + first + k[None, :], mask=(d < D)[:, None] & (first + k < D)[None, :], other=0.0)
        slope = tl.dot(e, of_h, input_precision="tf32x3")  # [BN, C]
        here = (block == i % BLOCKS)[None, :, None]
        before = tl.sum(tl.where(here, u.reshape(BN, DP // C, C), 0.0), 1)
        after = descend_tile(before, slope, h_ptr, scale_ptr, first, D, C, TOP)
        step = tl.load(scale_ptr + first + k, mask=first + k < D, other=0.0)
        change = ((after - before) * step[None, :])[:, None, :]
        e = tl.where(here, e.reshape(BN, DP // C, C) + change, e.reshape(BN, DP // C, C)).reshape(BN, DP)
        u = tl.where(here, after[:, None, :], u.reshape(BN, DP // C, C)).reshape(BN, DP)
    codes = tl.where(inside, u, 0.0).to(tl.int32)
    shifts = BITS * tl.arange(0, P)
    packed = tl.sum(codes.reshape(BN // P, P, DP) << shifts[None, :, None], 1) ^ 128
    line = tl.program_id(0) * (BN // P) + tl.arange(0, BN // P)
    at = (row * (tokens_all // P) + line)[:, None] * D + d[None, :]
    tl.store(bytes_ptr + at, packed.to(tl.int8), mask=(line < tokens_all // P)[:, None] & (d < D)[None, :])


def supports(x: Tensor, order: Tensor, count: Tensor, moment: Tensor) -> str | None:
    """None, or why these operands cannot be rounded here."""
    return why_not_packed(x, order) or why_not_here(x, order, count, moment)


def kv_round_keys(
    x: Tensor, order: Tensor, count: Tensor, moment: Tensor, bits: int, shrink: float, damping: float, sweeps: int,
    *, block: int = 16, tokens_each: int = 32, warps: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(words, scale, offset) of the op; ``block`` channels at a time of ``tokens_each`` tokens a program."""
    reason = supports(x, order, count, moment)
    if reason is not None:
        raise ValueError(f"kv_round_keys: {reason}")
    batch, heads, _, d = x.shape
    tokens, rows = order.shape[1], words_for(order.shape[1], bits)
    room = rows * tokens_per_word(bits)
    words = torch.empty((batch, heads, rows, d), dtype=torch.int16, device=x.device)
    scale, offset = (torch.empty((batch, heads, 1, d), dtype=torch.float32, device=x.device) for _ in range(2))
    strides = x.stride()[:3]
    kv_range_kernel[(ceil_div(d, 32), heads, batch)](
        x, order, count, scale, offset, heads, tokens, shrink / 2, *strides, BITS=bits, D=d, BD=32, BN=128,
        enable_fp_fusion=False,
    )  # fmt: skip
    if room:
        kv_round_keys_kernel[(ceil_div(room, tokens_each), heads, batch)](
            x, order, count, weighting(moment, damping, torch.float32), scale, offset, words.view(torch.int8), heads, tokens,
            room, sweeps, *strides, BITS=bits, D=d, DP=max(16, 1 << (d - 1).bit_length()), C=block, BN=tokens_each,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return words, scale, offset
