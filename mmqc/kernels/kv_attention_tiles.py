"""Kernels of kv_attention.py: scores, values, and the sum over parts.

    scores    x[t, r, g] = 2^(24 - b j) (codes_t[r, :] . q'[:, g]) m[g] + o[g]
              q' = t q s_K / m,  m = max |t q s_K|,  o = t q . a_K
    values    p = exp(g(x) - top);  part = (2^(24 - b j) p)ᵀ codes_t, then s_V and a_V sum p;  likewise for text
    combine   y = sum of parts / sum of sums,  lse = top + log sum of sums

A program has a stretch of one sequence's words, or of its text, for all the query heads of one KV head.  Scores stay in float32 in
between (in L2, mostly): g needs the range of all visual scores before the first exponential.
"""

# Triton's values are no Python values to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
import triton
import triton.language as tl

from mmqc.kernels.kv_words import plane_tile, upper_half

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def query_tile(q_ptr, scale_ptr, offset_ptr, b, h, stride_b, stride_h, heads, scaling,
               G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """The group's queries with K's scales: float16 [DP, GP], and per query m and o [GP]."""
    d, g = tl.arange(0, DP), tl.arange(0, GP)
    at = b * stride_b + (h * G + g)[None, :] * stride_h + d[:, None]
    inside = (d < D)[:, None] & (g < G)[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32) * scaling
    row = (b * heads + h) * D + d
    s = tl.load(scale_ptr + row, mask=d < D, other=0.0)
    a = tl.load(offset_ptr + row, mask=d < D, other=0.0)
    o = tl.sum(q * a[:, None], 0)
    q = q * s[:, None]
    m = tl.maximum(tl.max(tl.abs(q), 0), 1e-30)
    return (q / m[None, :]).to(tl.float16), m, o


@triton.jit
def kv_scores_kernel(
    q_ptr, words_ptr, scale_ptr, offset_ptr, count_ptr, text_ptr, text_count_ptr, score_ptr, low_ptr, high_ptr,
    rows_all, text_all, heads, scaling, stride_qb, stride_qh, stride_tb, stride_th, stride_tn, steps, text_steps,
    BITS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, SPLITS: tl.constexpr, TEXT_SPLITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One part's scores, and their range; its low is -inf for text, which has none."""
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    PLANES: tl.constexpr = 16 // BITS
    d, g, r = tl.arange(0, DP), tl.arange(0, GP), tl.arange(0, R)
    row = b * heads + h
    scores = score_ptr + row * (rows_all * PLANES + text_all) * G
    low, high = tl.full((GP,), float("-inf"), tl.float32), tl.full((GP,), float("-inf"), tl.float32)
    if part < SPLITS:
        # the range of every place of a tile, so that the loop holds no reduction
        lows, highs = tl.full((R, GP), float("inf"), tl.float32), tl.full((R, GP), float("-inf"), tl.float32)
        count = tl.load(count_ptr + b)
        q, m, o = query_tile(q_ptr, scale_ptr, offset_ptr, b, h, stride_qb, stride_qh, heads, scaling, G, GP, D, DP)
        last = tl.minimum((part + 1) * steps * R, tl.cdiv(count, PLANES))
        for start in range(part * steps * R, last, R):
            rows = start + r
            at = words_ptr + (row * rows_all + rows)[:, None] * D + d[None, :]
            words = tl.load(at, mask=(rows < last)[:, None] & (d < D)[None, :], other=0)
            for t in tl.static_range(PLANES):
                if t == PLANES // 2:
                    words = upper_half(words, PTX)
                shift = BITS * (t % (8 // BITS))
                codes = plane_tile(words, ((1 << BITS) - 1) << shift, PTX)
                x = tl.dot(codes, q) * (m * (1 << (24 - shift)))[None, :] + o[None, :]
                exists = ((rows * PLANES + t) < count) & (rows < last)
                lows = tl.minimum(lows, tl.where(exists[:, None], x, float("inf")))
                highs = tl.maximum(highs, tl.where(exists[:, None], x, float("-inf")))
                to = scores + (t * rows_all + rows)[:, None] * G + g[None, :]
                tl.store(to, x, mask=exists[:, None] & (g < G)[None, :])
        low, high = tl.min(lows, 0), tl.max(highs, 0)
    else:
        count = tl.load(text_count_ptr + b)
        query = b * stride_qb + (h * G + g)[None, :] * stride_qh + d[:, None]
        text_q = tl.load(q_ptr + query, mask=(d < D)[:, None] & (g < G)[None, :], other=0.0)
        n = tl.arange(0, BT)
        first = (part - SPLITS) * text_steps * BT
        for start in range(first, tl.minimum(first + text_steps * BT, count), BT):
            exists = start + n < count
            at = b * stride_tb + h * stride_th + (start + n).to(tl.int64)[:, None] * stride_tn + d[None, :]
            k = tl.load(text_ptr + at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
            x = tl.dot(k, text_q, input_precision="ieee") * scaling
            high = tl.maximum(high, tl.max(tl.where(exists[:, None], x, float("-inf")), 0))
            to = scores + (rows_all * PLANES + start + n)[:, None] * G + g[None, :]
            tl.store(to, x, mask=exists[:, None] & (g < G)[None, :])
    end = (row * (SPLITS + TEXT_SPLITS) + part) * GP + g
    tl.store(low_ptr + end, low)
    tl.store(high_ptr + end, high)


@triton.jit
def calibration_tile(low_ptr, high_ptr, row, tau1, tau2, GP: tl.constexpr, SPLITS: tl.constexpr, TEXT_SPLITS: tl.constexpr,
                     SP: tl.constexpr):  # fmt: skip
    """g(x) = slope x + shift of every query [GP], and the largest score after it."""
    s, g = tl.arange(0, SP), tl.arange(0, GP)
    at = (row * (SPLITS + TEXT_SPLITS) + s)[:, None] * GP + g[None, :]
    packed, text = (s < SPLITS)[:, None], ((s >= SPLITS) & (s < SPLITS + TEXT_SPLITS))[:, None]
    low = tl.min(tl.load(low_ptr + at, mask=packed, other=float("inf")), 0)
    high = tl.max(tl.load(high_ptr + at, mask=packed, other=float("-inf")), 0)
    top = tl.max(tl.load(high_ptr + at, mask=text, other=float("-inf")), 0)
    width = high - low
    plain = tau1 == tau2
    some = width >= 0
    low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
    slope = tl.maximum(width + (tau1 - tau2), 0.0) / tl.where(width > 0, width, 1.0)
    slope = tl.where(plain, 1.0, tl.where(width > 0, slope, 0.0))
    shift = tl.where(plain, -tau1, low - tau1 - slope * low)
    top = tl.maximum(top, tl.where(some, slope * high + shift, float("-inf")))
    return slope, shift, tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def kv_values_kernel(
    words_ptr, scale_ptr, offset_ptr, count_ptr, text_ptr, text_count_ptr, score_ptr, low_ptr, high_ptr, part_ptr, sum_ptr,
    rows_all, text_all, heads, tau1, tau2, stride_tb, stride_th, stride_tn, steps, text_steps,
    BITS: tl.constexpr, PER_TOKEN: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, BT: tl.constexpr, SPLITS: tl.constexpr, TEXT_SPLITS: tl.constexpr, SP: tl.constexpr, PTX: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One part of y [GP, DP] before the division, and its sum of p."""
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    PLANES: tl.constexpr = 16 // BITS
    d, g, r = tl.arange(0, DP), tl.arange(0, GP), tl.arange(0, R)
    row = b * heads + h
    scores = score_ptr + row * (rows_all * PLANES + text_all) * G
    slope, shift, top = calibration_tile(low_ptr, high_ptr, row, tau1, tau2, GP, SPLITS, TEXT_SPLITS, SP)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((DP, GP), tl.float32)
    real = (g < G)[None, :]
    if part < SPLITS:
        count = tl.load(count_ptr + b)
        sums, offsets = tl.zeros((R, GP), tl.float32), tl.zeros((R, GP), tl.float32)
        last = tl.minimum((part + 1) * steps * R, tl.cdiv(count, PLANES))
        for start in range(part * steps * R, last, R):
            rows = start + r
            at = words_ptr + (row * D + d)[:, None] * rows_all + rows[None, :]
            words = tl.load(at, mask=(d < D)[:, None] & (rows < last)[None, :], other=0)
            for t in tl.static_range(PLANES):
                if t == PLANES // 2:
                    words = upper_half(words, PTX)
                shift_t = BITS * (t % (8 // BITS))
                exists = (((rows * PLANES + t) < count) & (rows < last))[:, None] & real
                x = tl.load(scores + (t * rows_all + rows)[:, None] * G + g[None, :], mask=exists, other=0.0)
                p = tl.where(exists, tl.exp2((x * slope[None, :] + (shift - top)[None, :]) * LOG2E), 0.0)
                sums += p
                if PER_TOKEN:
                    token = row * rows_all * PLANES + rows * PLANES + t
                    offsets += p * tl.load(offset_ptr + token, mask=rows < last, other=0.0)[:, None]
                    p = p * tl.load(scale_ptr + token, mask=rows < last, other=0.0)[:, None]
                # 2^(7 - shift) p is a float16 and 2^(shift - 24) a code: 2^17 is left for the end
                codes = plane_tile(words, ((1 << BITS) - 1) << shift_t, PTX)
                acc = tl.dot(codes, (p * (128.0 / (1 << shift_t))).to(tl.float16), acc)
        total = tl.sum(sums, 0)
        if PER_TOKEN:
            acc = acc * 131072.0 + tl.sum(offsets, 0)[None, :]
        else:
            s = tl.load(scale_ptr + row * D + d, mask=d < D, other=0.0)
            a = tl.load(offset_ptr + row * D + d, mask=d < D, other=0.0)
            acc = acc * (s * 131072.0)[:, None] + a[:, None] * total[None, :]
    else:
        count = tl.load(text_count_ptr + b)
        n = tl.arange(0, BT)
        first = (part - SPLITS) * text_steps * BT
        for start in range(first, tl.minimum(first + text_steps * BT, count), BT):
            exists = start + n < count
            to = scores + (rows_all * PLANES + start + n)[:, None] * G + g[None, :]
            x = tl.load(to, mask=exists[:, None] & real, other=float("-inf"))
            p = tl.exp2((x - top[None, :]) * LOG2E)
            total += tl.sum(p, 0)
            at = b * stride_tb + h * stride_th + (start + n).to(tl.int64)[:, None] * stride_tn + d[None, :]
            v = tl.load(text_ptr + at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
            acc = tl.dot(v.T, p.to(DOT), acc, input_precision="ieee")
    place = row * (SPLITS + TEXT_SPLITS) + part
    tl.store(sum_ptr + place * GP + g, total)
    tl.store(part_ptr + (place * GP + g)[None, :] * D + d[:, None], acc, mask=(d < D)[:, None] & real)


@triton.jit
def kv_combine_kernel(
    part_ptr, sum_ptr, low_ptr, high_ptr, y_ptr, lse_ptr, heads, tau1, tau2,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, TEXT_SPLITS: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    """One query: y [D] and lse."""
    g, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = b * heads + h
    d = tl.arange(0, DP)
    _, _, top = calibration_tile(low_ptr, high_ptr, row, tau1, tau2, GP, SPLITS, TEXT_SPLITS, SP)
    top = tl.sum(tl.where(tl.arange(0, GP) == g, top, 0.0), 0)
    acc, total = tl.zeros((DP,), tl.float32), 0.0
    for s in range(SPLITS + TEXT_SPLITS):
        at = (row * (SPLITS + TEXT_SPLITS) + s) * GP + g
        total += tl.load(sum_ptr + at)
        acc += tl.load(part_ptr + at * D + d, mask=d < D, other=0.0)
    some = total > 0
    y = tl.where(some, acc / tl.where(some, total, 1.0), 0.0)
    query = row * G + g
    tl.store(y_ptr + query * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + query, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")))
