"""Kernels of kv_token_attention.py: one part of the sums, and the sum over parts.

    scores    X[t, r, i] = e_t . (q_r in block i alone)      x[t, r] = sum_i s_K[t, i] X[t, r, i] + (a_K + half s_K)[t, i] Q[r, i]
    parts     P[t, r] = 2^(x - top)     w[t, r, i] = P[t, r] s_V[t, i], rounded     Y[r, i, :] = sum_t w[t, r, i] e_t
              y_c = Y[r, c / g, c] + sum_t (P a_V + half w)[t, r, c / g]
    combine   y = sum of 2^top y / sum of 2^top sum P,   lse = log of that sum

e = u - half is exact in fp16 and bf16.  A column of a product is one block of one query's channels, the rest of them zero: scales
by block then multiply numbers of the product, never codes.  Half is added back times the rounded w: a block of one value, whose u
is 0, must not see the rounding.  Scores are in units of log 2.
"""

# Triton's values are no Python values to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

from mmqc.kernels.kv.kv_words import LOG2E, LOWEST
from mmqc.kernels.shared.int4_codes import int4_as_float, int8_as_float


@triton.jit
def block_of_queries(q_ptr, first, rows, length, stride_h, stride_q, PLANE: tl.constexpr, BLOCK: tl.constexpr, NBP: tl.constexpr,
                     W: tl.constexpr, WP: tl.constexpr, RB: tl.constexpr):
    """[WP, RB NBP]: channels PLANE W ... of row first + r in column (r, i), zero outside of block i."""
    n, c = tl.arange(0, RB * NBP), tl.arange(0, WP)
    row, channel = first + n // NBP, PLANE * W + c
    at = (row // length * stride_h + row % length * stride_q)[None, :] + channel[:, None]
    inside = (row < rows)[None, :] & (c < W)[:, None] & (channel[:, None] // BLOCK == (n % NBP)[None, :])
    return tl.load(q_ptr + at, mask=inside, other=0.0)


@triton.jit
def codes_tile(
    ptr, t, here, BITS: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr
):
    """The planes [BT, WP] of u - half of tokens t: of 4 bits the channels below D/2 and those above; of 8 bits both are one."""
    c = tl.arange(0, WP)
    packed = tl.load(ptr + t[:, None] * W + c[None, :], mask=here[:, None] & (c < W)[None, :], other=0)
    if BITS == 4:
        low, high = int4_as_float(packed, DTYPE, PTX)
    else:
        low = int8_as_float((packed ^ 128).to(tl.int8, bitcast=True), DTYPE, PTX)
        high = low
    return low, high


@triton.jit
def ranges_tile(scale_ptr, offset_ptr, t, here, NB: tl.constexpr, NBP: tl.constexpr):
    """float32 [BT, 1, NBP]: s and a of the blocks of tokens t."""
    i = tl.arange(0, NBP)
    at, inside = t[:, None] * NB + i[None, :], here[:, None] & (i < NB)[None, :]
    s = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(offset_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return s[:, None, :], a[:, None, :]


@triton.jit
def store_plane(part_ptr, y, shift, r, rows, PLANE: tl.constexpr, BLOCK: tl.constexpr, NBP: tl.constexpr, D: tl.constexpr,
                W: tl.constexpr, WP: tl.constexpr, RB: tl.constexpr):
    """Of sums [RB NBP, WP] of every block with every channel, and of shifts [RB, NBP], those of a channel with its own."""
    c, i = tl.arange(0, WP), tl.arange(0, NBP)
    own = (PLANE * W + c)[None, None, :] // BLOCK == i[None, :, None]
    found = tl.sum(tl.where(own, y.reshape(RB, NBP, WP) + shift[:, :, None], 0.0), 1)
    at = r[:, None] * D + PLANE * W + c[None, :]
    tl.store(part_ptr + at, found, mask=(r < rows)[:, None] & (c < W)[None, :])


@triton.jit(do_not_specialize=("length", "rows", "steps", "splits"))
def kv_token_parts_kernel(
    q_ptr, k_ptr, k_scale_ptr, k_offset_ptr, v_ptr, v_scale_ptr, v_offset_ptr, count_ptr, part_ptr, sum_ptr, top_ptr, heads,
    length, rows, scaling, steps, splits, stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_ksb, stride_ksh, stride_vb,
    stride_vh, stride_vsb, stride_vsh, BITS: tl.constexpr, BLOCK: tl.constexpr, NB: tl.constexpr, NBP: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, RB: tl.constexpr, BT: tl.constexpr, UP: tl.constexpr,
    CODES_ALIGN: tl.constexpr, RANGES_ALIGN: tl.constexpr, PTX: tl.constexpr,
):
    """RB rows of queries of one KV head with a stretch of its tokens.

    UP: what products of P and s are stored times.  *_ALIGN: bytes that every token's codes, and scales or offsets, start at a
    multiple of.
    """
    split, first = tl.program_id(0), tl.program_id(1) * RB
    head = tl.program_id(2).to(tl.int64)
    b, h = head // heads, head % heads
    N: tl.constexpr = RB * NBP
    HALF: tl.constexpr = 1 << (BITS - 1)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    k_ptr = tl.multiple_of(k_ptr + (b * stride_kb + h * stride_kh), CODES_ALIGN)
    v_ptr = tl.multiple_of(v_ptr + (b * stride_vb + h * stride_vh), CODES_ALIGN)
    k_scale_ptr = tl.multiple_of(k_scale_ptr + (b * stride_ksb + h * stride_ksh), RANGES_ALIGN)
    k_offset_ptr = tl.multiple_of(k_offset_ptr + (b * stride_ksb + h * stride_ksh), RANGES_ALIGN)
    v_scale_ptr = tl.multiple_of(v_scale_ptr + (b * stride_vsb + h * stride_vsh), RANGES_ALIGN)
    v_offset_ptr = tl.multiple_of(v_offset_ptr + (b * stride_vsb + h * stride_vsh), RANGES_ALIGN)
    q_ptr += b * stride_qb + h * (rows // length) * stride_qh
    low_q = block_of_queries(q_ptr, first, rows, length, stride_qh, stride_qq, 0, BLOCK, NBP, W, WP, RB)
    sums = tl.sum(low_q.to(tl.float32), 0)
    high_q, high_y = low_q, tl.zeros((N, WP), tl.float32)
    if BITS == 4:
        high_q = block_of_queries(q_ptr, first, rows, length, stride_qh, stride_qq, 1, BLOCK, NBP, W, WP, RB)
        sums += tl.sum(high_q.to(tl.float32), 0)
    sums = sums.reshape(1, RB, NBP)
    low_y, shift = tl.zeros((N, WP), tl.float32), tl.zeros((BT, RB, NBP), tl.float32)
    total, top = tl.zeros((BT, RB), tl.float32), tl.full((RB,), LOWEST, tl.float32)
    count = tl.load(count_ptr + b)
    for start in range(split * steps * BT, tl.minimum((split + 1) * steps * BT, count), BT):
        t = start + tl.arange(0, BT)
        here = t < count
        low_k, high_k = codes_tile(k_ptr, t, here, BITS, W, WP, DTYPE, PTX)
        low_v, high_v = codes_tile(v_ptr, t, here, BITS, W, WP, DTYPE, PTX)
        k_s, k_a = ranges_tile(k_scale_ptr, k_offset_ptr, t, here, NB, NBP)
        v_s, v_a = ranges_tile(v_scale_ptr, v_offset_ptr, t, here, NB, NBP)
        products = tl.dot(low_k, low_q, input_precision="ieee")
        if BITS == 4:
            products = tl.dot(high_k, high_q, products, input_precision="ieee")
        x = tl.sum(products.reshape(BT, RB, NBP) * k_s + sums * (k_a + HALF * k_s), 2) * (scaling * LOG2E)  # [BT, RB]
        x = tl.where(here[:, None], x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 0))
        less = tl.exp2(top - new)
        p = tl.exp2(x - new[None, :])
        top, total = new, total * less[None, :] + p
        w = (p[:, :, None] * (v_s * UP)).to(DTYPE)
        shift = shift * less[None, :, None] + (p[:, :, None] * v_a + w.to(tl.float32) * (HALF / UP))
        weights = tl.trans(w.reshape(BT, N))
        each = tl.broadcast_to(less[:, None], (RB, NBP)).reshape(N)[:, None]
        low_y = tl.dot(weights, low_v, low_y * each, input_precision="ieee")
        if BITS == 4:
            high_y = tl.dot(weights, high_v, high_y * each, input_precision="ieee")
    r = first + tl.arange(0, RB)
    place = (head * splits + split) * rows
    tl.store(sum_ptr + place + r, tl.sum(total, 0), mask=r < rows)
    tl.store(top_ptr + place + r, top, mask=r < rows)
    shifts = tl.sum(shift, 0)
    store_plane(part_ptr + place * D, low_y * (1.0 / UP), shifts, r, rows, 0, BLOCK, NBP, D, W, WP, RB)
    if BITS == 4:
        store_plane(part_ptr + place * D, high_y * (1.0 / UP), shifts, r, rows, 1, BLOCK, NBP, D, W, WP, RB)


@triton.jit(do_not_specialize=("rows", "parts"))
def kv_token_combine_kernel(
    part_ptr, sum_ptr, top_ptr, y_ptr, lse_ptr, rows, parts, D: tl.constexpr, DP: tl.constexpr, BP: tl.constexpr
):
    """One row: y [D] and lse; parts without a token are not read."""
    row = tl.program_id(0).to(tl.int64)
    first = row // rows * parts * rows + row % rows
    d, acc, total = tl.arange(0, DP), tl.zeros((DP,), tl.float32), tl.zeros((BP,), tl.float32)
    tops = tl.full((BP,), LOWEST, tl.float32)
    for start in range(0, parts, BP):
        s = start + tl.arange(0, BP)
        tops = tl.maximum(tops, tl.load(top_ptr + first + s * rows, mask=s < parts, other=LOWEST))
    top = tl.max(tops, 0)
    for start in range(0, parts, BP):
        s = start + tl.arange(0, BP)
        sums = tl.load(sum_ptr + first + s * rows, mask=s < parts, other=0.0)
        share = tl.exp2(tl.load(top_ptr + first + s * rows, mask=s < parts, other=LOWEST) - top)
        total += sums * share
        at = (first + s * rows)[:, None] * D + d[None, :]
        y = tl.load(part_ptr + at, mask=(sums > 0)[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(y * share[:, None], 0)
    all_of_it = tl.sum(total, 0)
    some = all_of_it > 0
    weight = tl.where(some, all_of_it, 1.0)
    tl.store(y_ptr + row * D + d, tl.where(some, acc / weight, 0.0).to(y_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + row, tl.where(some, (top + tl.log2(weight)) / LOG2E, float("-inf")))
