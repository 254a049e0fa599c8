"""Kernels of kv_attention.py, a warp each: the range of visual scores, one part of the sums, and the sum over parts.

    scores    x[t, g]  = 2^(-b j) (codes_t . Q[:, g]) m[g] + o[g]          Q = round(t log2(e) q s_K / m), 16 bits in two digits
    parts     P[t, g]  = round(32512 2^(g(x) - top));  part = codes_tᵀ P, then s_V, a_V and the places' factors;  likewise for text
    combine   y = sum of 2^top part / sum of 2^top sum P,   lse = log of that sum

Codes and digits are int8 and their sums int32: exact.  ``top`` is a whole number, so that a part with a new one shifts its sums.
A program has a stretch of one sequence's words, or of its text, for all the query heads of one KV head.  Scores are in units of
log 2.  Where g needs their range, a launch before finds it and leaves the scores, so that K is read once; else they are nowhere in
memory.
"""

# Triton's values are no Python values to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
import triton.language as tl
from triton.language.extra import cuda

from mmqc.kernels.kv.kv_words import (
    B8,
    DIGITS,
    LINES,
    LOG2E,
    LOWEST,
    ROUND,
    byte_row,
    code_planes,
    contraction_order,
    load_lines,
    place_factor,
    token_order,
    two_digits,
)
from mmqc.kernels.shared.gluon_tiles import MMA, gl, jit, mma, operand, tile

UNIT = tl.constexpr(32512.0)  # 127 * 256, the largest number of two digits
LOG2_UNIT = tl.constexpr(14.988684686772166)
SUMS = tl.constexpr(MMA)
A16, B16 = tl.constexpr(operand(0, 2)), tl.constexpr(operand(1, 2))


@tile
def score_layout(P: tl.constexpr, R: tl.constexpr, GP: tl.constexpr):
    """Zeros where scores [P R, GP] lie."""
    x, _ = gl.zeros([P * R, 2 * GP], tl.int32, SUMS).reshape([P * R, GP, 2]).split()
    return x.to(tl.float32)


@tile
def query_digits(q_ptr, scale_ptr, offset_ptr, b, h, row, stride_b, stride_h, scaling, like, BITS: tl.constexpr,
                 G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """The group's q s_K: C operands b [64, 2 GP], and per query m, o, and what the highest place adds to o [GP]."""
    N: tl.constexpr = 2 * GP
    n = gl.arange(0, N, layout=gl.SliceLayout(1, LINES))
    real = n // 2 < G
    q = load_lines(q_ptr + b * stride_b, (h * G + n // 2) * stride_h, real, D, C, "")
    s = load_lines(scale_ptr + row * D, n * 0, real, D, C, "")
    a = load_lines(offset_ptr + row * D, n * 0, real, D, C, "")
    scaled, o, m = (), gl.sum(a[0] * 0.0, 1), gl.sum(a[0] * 0.0, 1) + 1e-30
    for i in gl.static_range(C):
        x = q[i].to(tl.float32)
        o += gl.sum(x * a[i], 1)
        scaled = scaled + (x * s[i],)  # noqa: RUF005
        m = gl.maximum(m, gl.max(gl.abs(scaled[i]), 1))
    m = m * (1.0 / UNIT)
    digits, rest = (), (o * 0.0).to(tl.int32)
    is_high = (n % 2 == 0).to(tl.int32)[:, None]
    for i in gl.static_range(C):
        # a whole number from the 23rd bit on: its lowest byte is the low digit; half a carry, and the next is the high one
        whole = (scaled[i] * (1.0 / m)[:, None] + ROUND).to(tl.int32, bitcast=True)
        rest += gl.sum(whole - 0x4B400000, 1)
        digit = contraction_order(((whole + 128 * is_high) >> (8 * is_high)).to(tl.int8), N)
        digits = digits + (gl.convert_layout(digit.permute([1, 0]), B8, assert_trivial=True),)  # noqa: RUF005
    m, o = m * (scaling * LOG2E), o * (scaling * LOG2E)
    rest = rest.to(tl.float32) * m * (1 << (BITS - 1))
    return digits, each_query(m, like, GP), each_query(o, like, GP), each_query(rest, like, GP)


@tile
def each_query(x, like, GP: tl.constexpr):
    """[2 GP], the same for both digits, to [GP] along the columns of ``like``."""
    return gl.convert_layout(gl.max(x.reshape([GP, 2]), 1), gl.SliceLayout(0, like.type.layout))


@tile
def key_words(words_ptr, start, rows_all, BITS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """The R byte rows of the tokens from ``start`` on."""
    r = start * BITS // 8 + byte_row(gl.arange(0, R, layout=gl.SliceLayout(1, LINES)), BITS)
    return load_lines(words_ptr, r * D, r < rows_all, D, C, "evict_first")


@tile
def value_words(words_ptr, start, tokens_all, D: tl.constexpr, VR: tl.constexpr, T: tl.constexpr):
    """The lines of D channels, P a line, of T tokens."""
    c = gl.arange(0, VR, layout=gl.SliceLayout(1, LINES))
    return load_lines(words_ptr + start, c * tokens_all, c < D, tokens_all - start, T // 64, "evict_first")


@tile
def key_scores(words, q, m, o, rest, like, BITS: tl.constexpr, R: tl.constexpr, GP: tl.constexpr, C: tl.constexpr):
    """Scores [P R, GP] of the tokens in R byte rows."""
    P: tl.constexpr = 8 // BITS
    acc = gl.zeros([P * R, 2 * GP], tl.int32, SUMS)
    for i in gl.static_range(C):
        acc = mma(code_planes(words[i], BITS, R), q[i], acc)
    high, low = acc.reshape([P * R, GP, 2]).split()
    t = gl.arange(0, P * R, layout=gl.SliceLayout(1, like.type.layout)) // R
    o = gl.where((t == P - 1)[:, None], (o + rest)[None, :], o[None, :])
    return (high * 256 + low).to(tl.float32) * place_factor(t, BITS)[:, None] * m[None, :] + o


@tile
def token_places(like, BITS: tl.constexpr, R: tl.constexpr):
    """Which of a step's tokens each row of its scores is."""
    P: tl.constexpr = 8 // BITS
    i = gl.arange(0, P * R, layout=gl.SliceLayout(1, like.type.layout))
    return byte_row(i % R, BITS) * P + i // R


@tile
def score_places(like, T: tl.constexpr, GP: tl.constexpr):
    """Where a step's scores [T, GP] are kept: a register of a warp is 128 contiguous bytes."""
    i = gl.arange(0, T, layout=gl.SliceLayout(1, like.type.layout))
    return i[:, None] * GP + gl.arange(0, GP, layout=gl.SliceLayout(0, like.type.layout))[None, :]


@jit(do_not_specialize=("steps", "ranges"))
def kv_range_of_scores_kernel(
    q_ptr, words_ptr, scale_ptr, offset_ptr, count_ptr, low_ptr, high_ptr, score_ptr, rows_all, heads, scaling, stride_qb,
    stride_qh, steps, ranges, BITS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):
    """The visual scores of one part, and the least and the largest of them per query."""
    if EARLY:
        cuda.gdc_launch_dependents()
    part, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(tl.int64)
    P: tl.constexpr = 8 // BITS
    T: tl.constexpr = P * R
    row = b * heads + h
    like = score_layout(P, R, GP)
    keys, first = words_ptr + row * rows_all * D, part * steps * T
    following = key_words(keys, first, rows_all, BITS, R, D, C)
    count = gl.load(count_ptr + b)
    q, m, o, rest = query_digits(
        q_ptr, scale_ptr, offset_ptr, b, h, row, stride_qb, stride_qh, scaling, like, BITS, G, GP, D, C
    )
    scores, places = score_ptr + row * ((rows_all + R - 1) // R * T * GP), score_places(like, T, GP)
    low = gl.min((like + float("inf")).reshape([P, R, GP]), 0)
    high = gl.max((like + float("-inf")).reshape([P, R, GP]), 0)
    for start in range(first, gl.minimum(first + steps * T, count), T):
        if AHEAD:  # the next step's words arrive under this one
            words, following = following, key_words(keys, start + T, rows_all, BITS, R, D, C)
        else:
            words = key_words(keys, start, rows_all, BITS, R, D, C)
        x = key_scores(words, q, m, o, rest, like, BITS, R, GP, C)
        gl.store(scores + start * GP + places, x)
        y = x
        if start + T > count:
            exists = (start + token_places(like, BITS, R) < count)[:, None]
            x, y = gl.where(exists, x, float("inf")), gl.where(exists, x, float("-inf"))
        low = gl.minimum(low, gl.min(x.reshape([P, R, GP]), 0))
        high = gl.maximum(high, gl.max(y.reshape([P, R, GP]), 0))
    low, high = gl.min(low, 0), gl.max(high, 0)
    at = (row * ranges + part) * GP + gl.arange(0, GP, layout=low.type.layout)
    gl.store(low_ptr + at, low)
    gl.store(high_ptr + at, high)


@tile
def calibration_tile(low_ptr, high_ptr, row, ranges, tau1, tau2, like, GP: tl.constexpr, SP: tl.constexpr):
    """g(x) = slope x + shift of every query [GP], and the largest score after it."""
    s, g = gl.arange(0, SP, layout=gl.SliceLayout(1, LINES)), gl.arange(0, GP, layout=gl.SliceLayout(0, LINES))
    at, exists = (row * ranges + s)[:, None] * GP + g[None, :], (s < ranges)[:, None]
    low = gl.min(gl.load(low_ptr + at, mask=exists, other=float("inf")), 0)
    high = gl.max(gl.load(high_ptr + at, mask=exists, other=float("-inf")), 0)
    some = high >= low
    low, high = gl.where(some, low, 0.0), gl.where(some, high, 0.0)
    width, tau1, tau2 = high - low, tau1 * LOG2E, tau2 * LOG2E
    slope = gl.maximum(width + (tau1 - tau2), 0.0) / gl.where(width > 0, width, 1.0)
    slope = gl.where(width > 0, slope, 0.0)
    shift = low - tau1 - slope * low
    along: tl.constexpr = gl.SliceLayout(0, like.type.layout)
    return (
        gl.convert_layout(slope, along), gl.convert_layout(shift, along), gl.convert_layout(slope * high + shift, along),
    )


@tile
def value_range(scale_ptr, offset_ptr, token, tokens_all, BITS: tl.constexpr):
    """s_V of tokens, and the middle of their range: what p s_V loses by rounding then meets codes around 0."""
    s = gl.load(scale_ptr + token, mask=token < tokens_all, other=1.0)
    a = gl.load(offset_ptr + token, mask=token < tokens_all, other=0.0)
    return s, a + s * (1 << (BITS - 1))


@tile
def visual_part(  # noqa: C901  most of its branches are taken when it is compiled
    q_ptr, k_ptr, v_ptr, k_scale_ptr, k_offset_ptr, v_scale_ptr, v_offset_ptr, count_ptr, low_ptr, high_ptr, score_ptr, part, h,
    b, row, tokens_all, scaling, tau1, tau2, stride_qb, stride_qh, steps, ranges, BITS: tl.constexpr, RANGED: tl.constexpr,
    PER_TOKEN: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    VR: tl.constexpr, SP: tl.constexpr, EARLY: tl.constexpr,
):
    """Sums [P VR, GP] of p v by channels, of p [GP], and top [GP]."""
    P: tl.constexpr = 8 // BITS
    T: tl.constexpr = P * R
    like = score_layout(P, R, GP)
    rows_all, first = tokens_all // P, part * steps * T
    keys, values = k_ptr + row * rows_all * D, v_ptr + row * (D // P) * tokens_all
    scores = score_ptr + row * ((rows_all + R - 1) // R * T * GP) + score_places(like, T, GP)
    count = gl.load(count_ptr + b)
    if RANGED:
        if EARLY:
            cuda.gdc_wait()
        slope, shift, top = calibration_tile(low_ptr, high_ptr, row, ranges, tau1, tau2, like, GP, SP)
        top = gl.ceil(top)
        shift = shift if PER_TOKEN else shift - (top - LOG2_UNIT)
    else:  # tau1 = tau2
        q, m, o, rest = query_digits(
            q_ptr, k_scale_ptr, k_offset_ptr, b, h, row, stride_qb, stride_qh, scaling, like, BITS, G, GP, D, C
        )
        o = o - tau1 * LOG2E
    if PER_TOKEN or not RANGED:  # known step by step; that of p s_V is far below that of p
        top = gl.max(like, 0) + LOWEST
    acc = gl.zeros([P * VR, 2 * GP], tl.int32, SUMS)
    weights = gl.sum(like.reshape([P, R, GP]), 0)
    total, offsets = weights, weights
    for start in range(first, gl.minimum(first + steps * T, count), T):
        v = value_words(values, start, tokens_all, D // P, VR, T)
        if RANGED:
            x = gl.load(scores + start * GP) * slope[None, :] + shift[None, :]
        else:
            words = key_words(keys, start, rows_all, BITS, R, D, C)
            x = key_scores(words, q, m, o, rest, like, BITS, R, GP, C)
        tokens = start + token_places(like, BITS, R)
        if start + T > count:
            x = gl.where((tokens < count)[:, None], x, float("-inf"))
        w = x
        if PER_TOKEN:
            s, middle = value_range(
                v_scale_ptr + row * tokens_all, v_offset_ptr + row * tokens_all, tokens, tokens_all, BITS
            )
            w = x + gl.log2(s)[:, None]
        if PER_TOKEN or not RANGED:
            sums, top = under_new_top((acc, weights, total, offsets), top, w, GP)
            acc, weights, total, offsets = sums
            w = w - (top - LOG2_UNIT)[None, :]
        y = gl.exp2(w) + DIGITS
        weights += gl.sum((y - DIGITS).reshape([P, R, GP]), 0)
        if PER_TOKEN:
            e = gl.exp2(x - (top - LOG2_UNIT)[None, :])
            total += gl.sum(e.reshape([P, R, GP]), 0)
            offsets += gl.sum((e * middle[:, None]).reshape([P, R, GP]), 0)
        p = token_order(two_digits(y, T, GP), BITS, 2 * GP)
        for i in gl.static_range(T // 64):
            acc = mma(code_planes(v[i], BITS, VR), gl.convert_layout(p[i], B8), acc)
    s_ptr, a_ptr = v_scale_ptr + row * D, v_offset_ptr + row * D
    return values_of_sums(acc, weights, total, offsets, top, s_ptr, a_ptr, BITS, PER_TOKEN, GP, D, VR)


@tile
def under_new_top(sums, top, w, GP: tl.constexpr):
    """The sums so far and top [GP], where w [P R, GP] has larger scores."""
    acc, weights, total, offsets = sums
    new = gl.maximum(top, gl.ceil(gl.max(w, 0)))
    rise = new - top
    if gl.max(rise, 0) > 0:
        high, low = acc.reshape([acc.shape[0], GP, 2]).split()
        by = gl.convert_layout(gl.minimum(rise, 31.0).to(tl.int32), gl.SliceLayout(0, high.type.layout))[None, :]
        # what the high digits' sums lose is whole units of the low ones: at 1 bit, 1e-3 of the result
        rest = high & ((1 << by) - 1)
        low = (low >> by) + ((rest >> gl.maximum(by - 8, 0)) << gl.maximum(8 - by, 0))
        acc = gl.convert_layout(gl.join(high >> by, low).reshape(acc.shape), acc.type.layout, assert_trivial=True)
        less = gl.convert_layout(gl.exp2(0.0 - rise), gl.SliceLayout(0, weights.type.layout))[None, :]
        weights, total, offsets = weights * less, total * less, offsets * less
    return (acc, weights, total, offsets), new


@tile
def values_of_sums(acc, weights, total, offsets, top, scale_ptr, offset_ptr, BITS: tl.constexpr, PER_TOKEN: tl.constexpr,
                   GP: tl.constexpr, D: tl.constexpr, VR: tl.constexpr):
    """Sums of p v by channels [P VR, GP], of p [GP], and top [GP], from digits and codes."""
    P: tl.constexpr = 8 // BITS
    high, low = acc.reshape([P * VR, GP, 2]).split()
    y = (high.to(tl.float32) * 256.0 + low.to(tl.float32)).reshape([P, VR, GP]).permute([1, 0, 2]).reshape([P * VR, GP])
    d = gl.arange(0, P * VR, layout=gl.SliceLayout(1, y.type.layout))
    along: tl.constexpr = gl.SliceLayout(0, y.type.layout)
    weights = gl.convert_layout(gl.sum(weights, 0), along)
    y = y * place_factor(d % P, BITS)[:, None]
    signed, middle = (d % P == P - 1)[:, None], (weights * (1 << (BITS - 1)))[None, :]
    if PER_TOKEN:
        y = y + gl.where(signed, 0.0, 0.0 - middle) + gl.convert_layout(gl.sum(offsets, 0), along)[None, :]
        weights = gl.convert_layout(gl.sum(total, 0), along)
    else:
        y = y + gl.where(signed, middle, 0.0)
        s = gl.load(scale_ptr + d, mask=d < D, other=0.0)
        a = gl.load(offset_ptr + d, mask=d < D, other=0.0)
        y = y * s[:, None] + a[:, None] * weights[None, :]
    return y * (1.0 / UNIT), weights * (1.0 / UNIT), gl.convert_layout(top, along)


@tile
def text_part(
    q_ptr, k_ptr, v_ptr, count_ptr, part, h, b, scaling, stride_qb, stride_qh, stride_kb, stride_kh, stride_kn, stride_vb,
    stride_vh, stride_vn, steps, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
):
    """The same of tokens in q's dtype: sums [64 C, N], of p [N], and top [N]."""
    n, t = gl.arange(0, N, layout=gl.SliceLayout(1, LINES)), gl.arange(0, BT, layout=gl.SliceLayout(1, LINES))
    d = gl.arange(0, 64 * C, layout=gl.SliceLayout(0, LINES))[None, :]
    at = q_ptr + b * stride_qb + (h * G + n)[:, None] * stride_qh + d
    q = gl.convert_layout(gl.load(at, mask=(n < G)[:, None] & (d < D), other=0.0).permute([1, 0]), B16)
    count = gl.load(count_ptr + b)
    acc = gl.zeros([64 * C, N], tl.float32, SUMS)
    total = gl.zeros([N], tl.float32, gl.SliceLayout(0, SUMS))
    top = gl.full([N], LOWEST, tl.float32, gl.SliceLayout(0, SUMS))
    k_ptr, v_ptr = k_ptr + b * stride_kb + h * stride_kh, v_ptr + b * stride_vb + h * stride_vh
    for start in range(part * steps * BT, gl.minimum((part + 1) * steps * BT, count), BT):
        here = (start + t < count)[:, None] & (d < D)
        k = gl.load(k_ptr + (start + t)[:, None] * stride_kn + d, mask=here, other=0.0)
        x = mma(gl.convert_layout(k, A16), q, gl.zeros([BT, N], tl.float32, SUMS)) * (scaling * LOG2E)
        exists = start + gl.arange(0, BT, layout=gl.SliceLayout(1, SUMS)) < count
        x = gl.where(exists[:, None], x, float("-inf"))
        new = gl.maximum(top, gl.max(x, 0))
        p, less = gl.exp2(x - new[None, :]), gl.exp2(top - new)
        top, total = new, total * less + gl.sum(p, 0)
        v = gl.load(v_ptr + (start + t)[:, None] * stride_vn + d, mask=here, other=0.0)
        p = gl.convert_layout(p.to(v.dtype), B16)
        acc = mma(gl.convert_layout(v.permute([1, 0]), A16), p, acc * less[None, :])
    return acc, total, top


@tile
def store_part(part_ptr, sum_ptr, top_ptr, place, part, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
               COLS: tl.constexpr):
    """One part of all the queries of a KV head."""
    y, total, top = part
    d = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
    g = gl.arange(0, COLS, layout=gl.SliceLayout(0, y.type.layout))
    gl.store(part_ptr + (place * G + g)[None, :] * D + d[:, None], y, mask=(d < D)[:, None] & (g < G)[None, :])
    gl.store(sum_ptr + place * G + g, total, mask=g < G)
    gl.store(top_ptr + place * G + g, top, mask=g < G)


@jit(do_not_specialize=("steps", "ranges", "splits", "text_splits"))
def kv_parts_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, k_offset_ptr, v_scale_ptr, v_offset_ptr, count_ptr, k_text_ptr, v_text_ptr,
    text_count_ptr, low_ptr, high_ptr, score_ptr, part_ptr, sum_ptr, top_ptr, tokens_all, heads, scaling, tau1, tau2,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, steps, ranges,
    splits, text_splits, BITS: tl.constexpr, RANGED: tl.constexpr, PER_TOKEN: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, VR: tl.constexpr, BT: tl.constexpr, SP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One part, of visual tokens or of text."""
    if EARLY:
        cuda.gdc_launch_dependents()
    part, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(tl.int64)
    row = b * heads + h
    place = row * (splits + text_splits) + part
    if part < splits:
        seen = visual_part(
            q_ptr, k_ptr, v_ptr, k_scale_ptr, k_offset_ptr, v_scale_ptr, v_offset_ptr, count_ptr, low_ptr, high_ptr, score_ptr,
            part, h, b, row, tokens_all, scaling, tau1, tau2, stride_qb, stride_qh, steps, ranges, BITS, RANGED, PER_TOKEN, G, GP,
            D, C, R, VR, SP, EARLY,
        )
        store_part(part_ptr, sum_ptr, top_ptr, place, seen, G, D, 8 // BITS * VR, GP)
    else:
        if RANGED and EARLY:
            cuda.gdc_wait()
        N: tl.constexpr = 8 if GP < 8 else GP
        read = text_part(
            q_ptr, k_text_ptr, v_text_ptr, text_count_ptr, part - splits, h, b, scaling, stride_qb, stride_qh, stride_kb,
            stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, steps, G, N, D, C, BT,
        )
        store_part(part_ptr, sum_ptr, top_ptr, place, read, G, D, 64 * C, N)
