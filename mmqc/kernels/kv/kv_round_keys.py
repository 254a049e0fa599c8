"""Visual keys to words, with codes that keep the scores of the queries to come (ops/kv_round_keys.py).

    ranges   scale, offset of a channel, by kv_pack's kernel
    round    e = s u + a - x of BN tokens, which stays in the cache;  for C channels at a time:  G = e H[:, C],  channel by channel
             u_c <- round(clamp(u_c - G_c / (s_c H_cc), 0, 2^b - 1)),  G <- G + (change s_c) H[c, C];  then e in these channels

Shapes:  those of the op; x [B, H, L, D] with contiguous channels, D to 256
Why:     tokens do not depend on each other, and of the slope only the next C channels are ever needed: one product brings it up to
         date for all that changed since, where a rank-one update of all D for each channel would go through memory D times.
Exact:   ranges and nearest codes as kv_pack's kernel has them.  The slope is what the reference's is, but for the order of its
         float32 sums (products of three TF32 parts, about 2^-22): a code differs only where a step of the descent lies that near to
         the middle between two codes, and then what that token's descent does afterwards.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.kv.kv_pack import kv_range_kernel
from mmqc.kernels.kv.kv_pack import why_not_layout as why_not_packed
from mmqc.kernels.kv.kv_words import ROUND
from mmqc.kernels.shared.device_facts import ceil_div, multiprocessors, why_not_here
from mmqc.kernels.shared.plan import Refusal
from mmqc.ops.kv_round_keys import weighting
from mmqc.ops.kv_words import tokens_per_word, words_for


@dataclass(frozen=True)
class RoundConfig:
    """How the launch shares the device.

    Attributes:
        block: channels for which a product brings the slope up to date.
        tokens: of a program at a time, 16 for each of its ``warps``: then a row of a product lies in one of them.
        per_sm: programs a multiprocessor.
        registers: a thread's at most; 0: any.
    """

    block: int = 16
    tokens: int = 32
    warps: int = 2
    per_sm: int = 8
    registers: int = 128


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
def store_codes(bytes_ptr, u, n, c, tokens_all, BITS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BN: tl.constexpr):
    """Codes [BN, C] of tokens n, the first a multiple of 8, and channels c to their bytes."""
    P: tl.constexpr = 8 // BITS
    shifts = BITS * tl.arange(0, P)
    packed = tl.sum(u.to(tl.int32).reshape(BN // P, P, C) << shifts[None, :, None], 1) ^ 128
    line = tl.min(n, 0) // P + tl.arange(0, BN // P)
    stored = (line < tokens_all // P)[:, None] & (c < D)[None, :]
    tl.store(bytes_ptr + line[:, None] * D + c[None, :], packed.to(tl.int8), mask=stored)


@triton.jit
def load_codes(bytes_ptr, n, c, inside, BITS: tl.constexpr, D: tl.constexpr):
    """What ``store_codes`` stored, 0 outside."""
    P: tl.constexpr = 8 // BITS
    packed = tl.load(bytes_ptr + (n // P)[:, None] * D + c[None, :], mask=inside, other=-128).to(tl.int32) ^ 128
    return ((packed >> (n % P * BITS)[:, None]) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def nearest_codes(x_ptr, e_ptr, bytes_ptr, scale_ptr, offset_ptr, place, exists, n, stride_l, tokens_all, BITS: tl.constexpr,
                  D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, BN: tl.constexpr):
    """The codes next to the keys, and their errors to e [BN, DP]."""
    at_e = e_ptr + tl.arange(0, BN)[:, None] * DP
    for first in range(0, DP, C):
        c = first + tl.arange(0, C)
        inside = exists[:, None] & (c < D)[None, :]
        x = tl.load(x_ptr + place[:, None] * stride_l + c[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + c, mask=c < D, other=1.0)[None, :]
        offset = tl.load(offset_ptr + c, mask=c < D, other=0.0)[None, :]
        u = nearest_tile(tl.div_rn(x - offset, tl.broadcast_to(scale, (BN, C))), (1 << BITS) - 1.0)
        u = tl.where(inside, u, 0.0)
        tl.store(at_e + c[None, :], tl.where(inside, u * scale + offset - x, 0.0))
        store_codes(bytes_ptr, u, n, c, tokens_all, BITS, D, C, BN)


@triton.jit
def slope_tile(e_ptr, h_ptr, c, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The slope [BN, C] of channels c: e H[:, c]."""
    at_e, slope = e_ptr + tl.arange(0, BN)[:, None] * DP, tl.zeros((BN, C), tl.float32)
    for start in tl.static_range(0, DP, BK):
        d = start + tl.arange(0, BK)
        of_h = tl.load(h_ptr + d[:, None] * D + c[None, :], mask=(d < D)[:, None] & (c < D)[None, :], other=0.0)
        slope = tl.dot(tl.load(at_e + d[None, :]), of_h, slope, input_precision="tf32x3")
    return slope


@triton.jit(do_not_specialize=("tiles", "sweeps"))
def kv_round_keys_kernel(
    x_ptr, order_ptr, count_ptr, h_ptr, scale_ptr, offset_ptr, e_ptr, bytes_ptr, heads, tokens, tokens_all, tiles, tiles_each,
    sweeps, stride_b, stride_h, stride_l, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):
    """The bytes of BN tokens of one head, and of others, until there are no more."""
    BLOCKS: tl.constexpr = (D + C - 1) // C
    e_ptr += tl.program_id(0).to(tl.int64) * (BN * DP)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // tiles_each).to(tl.int64)
        b, h = row // heads, row % heads
        n = tile % tiles_each * BN + tl.arange(0, BN)
        exists = n < tl.minimum(tl.load(count_ptr + b), tokens)
        place = tl.load(order_ptr + b * tokens + n, mask=exists, other=0)
        matrix, scale, offset = h_ptr + h * D * D, scale_ptr + row * D, offset_ptr + row * D
        x, codes = x_ptr + b * stride_b + h * stride_h, bytes_ptr + row * (tokens_all // (8 // BITS)) * D
        nearest_codes(x, e_ptr, codes, scale, offset, place, exists, n, stride_l, tokens_all, BITS, D, DP, C, BN)
        steps = tl.where(tl.sum(exists.to(tl.int32), 0) > 0, sweeps * BLOCKS, 0)
        for i in range(steps):
            tl.debug_barrier()  # what was stored is there for all
            first = i % BLOCKS * C
            c = first + tl.arange(0, C)
            inside = exists[:, None] & (c < D)[None, :]
            before = load_codes(codes, n, c, inside, BITS, D)
            slope = slope_tile(e_ptr, matrix, c, D, DP, C, BN, BK)
            after = descend_tile(before, slope, matrix, scale, first, D, C, (1 << BITS) - 1.0)
            after = tl.where(inside, after, 0.0)
            step = tl.load(scale + c, mask=c < D, other=0.0)[None, :]
            at_e = e_ptr + tl.arange(0, BN)[:, None] * DP + c[None, :]
            error = tl.load(at_e) + (after - before) * step
            tl.debug_barrier()  # and all have read what was there
            tl.store(at_e, error)
            store_codes(codes, after, n, c, tokens_all, BITS, D, C, BN)
        tl.debug_barrier()


def why_not(x: Tensor, order: Tensor, count: Tensor, moment: Tensor) -> str | None:
    """None, or why these operands cannot be rounded here."""
    return why_not_packed(x, order) or why_not_here(x, order, count, moment)


def kv_round_keys(
    x: Tensor, order: Tensor, count: Tensor, moment: Tensor, bits: int, shrink: float, damping: float, sweeps: int,
    *, config: RoundConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor] | Refusal:
    """(words, scale, offset) of the op, or why it is not had here."""
    if reason := why_not(x, order, count, moment):
        return Refusal(reason)
    batch, heads, _, d = x.shape
    tokens, rows = order.shape[1], words_for(order.shape[1], bits)
    room = rows * tokens_per_word(bits)
    words = torch.empty((batch, heads, rows, d), dtype=torch.int16, device=x.device)
    scale, offset = (torch.empty((batch, heads, 1, d), dtype=torch.float32, device=x.device) for _ in range(2))
    strides = x.stride()[:3]
    kv_range_kernel[(ceil_div(d, 32), heads, batch)](
        x, order, count, scale, offset, heads, tokens, shrink / 2, *strides, BITS=bits, D=d, BD=32, BN=128,
        enable_fp_fusion=False,
    )
    if room:
        c, width = config or RoundConfig(), max(16, 1 << (d - 1).bit_length())
        each = ceil_div(room, c.tokens)
        programs = min(batch * heads * each, c.per_sm * multiprocessors(x.device))
        errors = torch.empty((programs, c.tokens, width), dtype=torch.float32, device=x.device)
        # Stages above 1 would read what a step has yet to store.
        kv_round_keys_kernel[(programs,)](
            x, order, count, weighting(moment, damping, torch.float32), scale, offset, errors, words.view(torch.int8), heads,
            tokens, room, batch * heads * each, each, sweeps, *strides, BITS=bits, D=d, DP=width, C=c.block, BN=c.tokens,
            BK=16, num_warps=c.warps, num_stages=1, enable_fp_fusion=False, **({"maxnreg": c.registers} if c.registers else {}),
        )
    return words, scale, offset
