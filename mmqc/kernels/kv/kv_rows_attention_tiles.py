"""Kernel of kv_rows_attention.py: the sums of one split of the tokens; kv_token_attention_tiles.py adds splits up.

    scores    X_p[t, r] = u_K[t, p] · q_p[r]     x[t, r] = scaling sum_p (s_K[t, p] X_p + o_K[t, p] Q_p[r])     Q_p = sum of q_p
    split     P[t, r] = 2^(x - top)     w_p[t, r] = P s_V[t, p], rounded     y_p[:, r] = sum_t u_V[t, p] w_p + sum_t P o_V[t, p]

A part in 4 bits is two planes of channels, in the lower and in the upper halves of its bytes (ops/pack.py); one in 8 bits is one.
Codes are signed, so that nothing is added back, and exact in fp16 and bf16.  Scores are in units of log 2.  Tokens are the rows of
the one product and channels those of the other: there are enough of both for every warp to have its own.
"""

# Triton's values are no Python values to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false
import triton
import triton.language as tl

from mmqc.kernels.kv.kv_words import LOG2E, LOWEST
from mmqc.kernels.shared.int4_codes import int4_as_float, int8_as_float


@triton.jit
def plane_of_queries(q_ptr, r, rows, length, stride_h, stride_q, FIRST: tl.constexpr, COUNT: tl.constexpr,
                     PAD: tl.constexpr):
    """[PAD, RB]: COUNT channels of rows r, from FIRST on, and zeros."""
    c = tl.arange(0, PAD)
    at = (r // length * stride_h + r % length * stride_q)[None, :] + (FIRST + c)[:, None]
    return tl.load(q_ptr + at, mask=(r < rows)[None, :] & (c < COUNT)[:, None], other=0.0)


@triton.jit
def codes_tile(at, inside, PACKED: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The planes of a part's codes, from its bytes; of 8 bits both are one."""
    stored = tl.load(at, mask=inside, other=0)
    if PACKED:
        below, above = int4_as_float(stored, DTYPE, PTX)
    else:
        below = int8_as_float(stored.to(tl.int8, bitcast=True), DTYPE, PTX)
        above = below
    return below, above


@triton.jit
def number_tile(ptr, t, here, ROW: tl.constexpr, WHOLE: tl.constexpr):
    """float32 [BT], one of each row; byte by byte where rows do not start at multiples of 4."""
    at = ptr + t * ROW
    if WHOLE:
        x = tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True), mask=here, other=0.0)
    else:
        a = tl.load(at, mask=here, other=0).to(tl.int32) | (tl.load(at + 1, mask=here, other=0).to(tl.int32) << 8)
        b = tl.load(at + 2, mask=here, other=0).to(tl.int32) | (tl.load(at + 3, mask=here, other=0).to(tl.int32) << 8)
        x = (a | (b << 16)).to(tl.float32, bitcast=True)
    return x


@triton.jit
def part_scores(ptr, scale_ptr, t, here, below_q, above_q, sums, PARTS: tl.constexpr, ROW: tl.constexpr, BYTES: tl.constexpr,
                PAD: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr):
    """[BT, RB]: s (q · u) + o sum q of one part."""
    c = tl.arange(0, PAD)
    inside = here[:, None] & (c < BYTES)[None, :]
    below, above = codes_tile(ptr + t[:, None] * ROW + c[None, :], inside, PACKED, below_q.dtype, PTX)
    products = tl.dot(below, below_q, input_precision="ieee")
    if PACKED:
        products = tl.dot(above, above_q, products, input_precision="ieee")
    s = number_tile(scale_ptr, t, here, ROW, WHOLE)
    o = number_tile(scale_ptr + 4 * PARTS, t, here, ROW, WHOLE)
    return products * s[:, None] + o[:, None] * sums[None, :]


@triton.jit
def add_part(ptr, scale_ptr, t, here, p, less, below_y, above_y, shift, PARTS: tl.constexpr, ROW: tl.constexpr,
             BYTES: tl.constexpr, PAD: tl.constexpr, PACKED: tl.constexpr, UP: tl.constexpr, WHOLE: tl.constexpr,
             DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Sums [PAD, RB] of a part's planes, times UP, and its shifts [BT, RB], with the tokens t."""
    c = tl.arange(0, PAD)
    inside = (c < BYTES)[:, None] & here[None, :]
    below, above = codes_tile(ptr + c[:, None] + t[None, :] * ROW, inside, PACKED, DTYPE, PTX)  # [PAD, BT]
    s = number_tile(scale_ptr, t, here, ROW, WHOLE)
    o = number_tile(scale_ptr + 4 * PARTS, t, here, ROW, WHOLE)
    weights = (p * (s * UP)[:, None]).to(DTYPE)
    below_sum = tl.dot(below, weights, below_y * less[None, :], input_precision="ieee")
    above_sum = above_y
    if PACKED:
        above_sum = tl.dot(above, weights, above_y * less[None, :], input_precision="ieee")
    return below_sum, above_sum, shift * less[None, :] + p * o[:, None]


@triton.jit
def store_part(partial_ptr, below_y, above_y, shift, r, rows, D: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
               BYTES: tl.constexpr, PAD: tl.constexpr, PACKED: tl.constexpr, UP: tl.constexpr):
    """Write the WIDTH channels of a part, from FIRST on, of rows r."""
    c, more = tl.arange(0, PAD), tl.sum(shift, 0)[None, :]
    at, inside = partial_ptr + r[None, :] * D + (FIRST + c)[:, None], (r < rows)[None, :]
    tl.store(at, below_y * (1.0 / UP) + more, mask=inside & (c < BYTES)[:, None])
    if PACKED:
        tl.store(at + BYTES, above_y * (1.0 / UP) + more, mask=inside & (c < WIDTH - BYTES)[:, None])


@triton.jit(
    do_not_specialize=(
        "length",
        "rows",
        "tokens",
        "steps",
        "splits",
        "stride_kb",
        "stride_kh",
        "stride_vb",
        "stride_vh",
    )
)
def kv_rows_split_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, sum_ptr, top_ptr, heads, length, rows, tokens, scaling, steps, splits, stride_qb, stride_qh,
    stride_qq, stride_kb, stride_kh, stride_vb, stride_vh, LOW: tl.constexpr, LOW_BYTES: tl.constexpr, LOW_PAD: tl.constexpr,
    LOW_PACKED: tl.constexpr, LOW_UP: tl.constexpr, HIGH: tl.constexpr, HIGH_BYTES: tl.constexpr, HIGH_PAD: tl.constexpr,
    HIGH_PACKED: tl.constexpr, HIGH_UP: tl.constexpr, ROW: tl.constexpr, RB: tl.constexpr, BT: tl.constexpr, ALIGN: tl.constexpr,
    PTX: tl.constexpr,
):
    """RB rows of queries of one KV head with a stretch of its tokens.

    LOW, HIGH: widths of the parts, HIGH = 0 where there is one.  *_UP: what products of P and s are stored times.  ALIGN: bytes
    that every row starts at a multiple of.
    """
    split, first = tl.program_id(0), tl.program_id(1) * RB
    head = tl.program_id(2).to(tl.int64)
    b, h = head // heads, head % heads
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    PARTS: tl.constexpr = 1 + (HIGH > 0)
    WHOLE: tl.constexpr = ALIGN % 4 == 0  # scales begin 8 PARTS bytes before the next row
    SCALES: tl.constexpr = ROW - 8 * PARTS
    D: tl.constexpr = LOW + HIGH
    k_ptr = tl.multiple_of(k_ptr + (b * stride_kb + h * stride_kh), ALIGN)
    v_ptr = tl.multiple_of(v_ptr + (b * stride_vb + h * stride_vh), ALIGN)
    r = first + tl.arange(0, RB).to(tl.int64)
    q_ptr += b * stride_qb + h * (rows // length) * stride_qh
    low_q = plane_of_queries(q_ptr, r, rows, length, stride_qh, stride_qq, 0, LOW_BYTES, LOW_PAD)
    low_q2 = plane_of_queries(q_ptr, r, rows, length, stride_qh, stride_qq, LOW_BYTES, LOW - LOW_BYTES, LOW_PAD)
    low_sums = tl.sum(low_q.to(tl.float32), 0) + tl.sum(low_q2.to(tl.float32), 0)
    high_q = plane_of_queries(q_ptr, r, rows, length, stride_qh, stride_qq, LOW, HIGH_BYTES, HIGH_PAD)
    high_q2 = plane_of_queries(
        q_ptr, r, rows, length, stride_qh, stride_qq, LOW + HIGH_BYTES, HIGH - HIGH_BYTES, HIGH_PAD
    )
    high_sums = tl.sum(high_q.to(tl.float32), 0) + tl.sum(high_q2.to(tl.float32), 0)
    low_y, low_y2 = tl.zeros((LOW_PAD, RB), tl.float32), tl.zeros((LOW_PAD, RB), tl.float32)
    high_y, high_y2 = tl.zeros((HIGH_PAD, RB), tl.float32), tl.zeros((HIGH_PAD, RB), tl.float32)
    low_shift, high_shift = tl.zeros((BT, RB), tl.float32), tl.zeros((BT, RB), tl.float32)
    total, top = tl.zeros((BT, RB), tl.float32), tl.full((RB,), LOWEST, tl.float32)
    for start in range(split * steps * BT, tl.minimum((split + 1) * steps * BT, tokens), BT):
        t = start + tl.arange(0, BT)
        here = t < tokens
        x = part_scores(k_ptr, k_ptr + SCALES, t, here, low_q, low_q2, low_sums, PARTS, ROW, LOW_BYTES, LOW_PAD, LOW_PACKED,
                        WHOLE, PTX)
        if HIGH:
            x += part_scores(k_ptr + LOW_BYTES, k_ptr + SCALES + 4, t, here, high_q, high_q2, high_sums, PARTS, ROW, HIGH_BYTES,
                             HIGH_PAD, HIGH_PACKED, WHOLE, PTX)
        x = tl.where(here[:, None], x * (scaling * LOG2E), float("-inf"))
        new = tl.maximum(top, tl.max(x, 0))
        less = tl.exp2(top - new)
        p = tl.exp2(x - new[None, :])
        top, total = new, total * less[None, :] + p
        low_y, low_y2, low_shift = add_part(
            v_ptr, v_ptr + SCALES, t, here, p, less, low_y, low_y2, low_shift, PARTS, ROW, LOW_BYTES, LOW_PAD, LOW_PACKED,
            LOW_UP, WHOLE, DTYPE, PTX)
        if HIGH:
            high_y, high_y2, high_shift = add_part(
                v_ptr + LOW_BYTES, v_ptr + SCALES + 4, t, here, p, less, high_y, high_y2, high_shift, PARTS, ROW, HIGH_BYTES,
                HIGH_PAD, HIGH_PACKED, HIGH_UP, WHOLE, DTYPE, PTX)
    place = (head * splits + split) * rows
    tl.store(sum_ptr + place + r, tl.sum(total, 0), mask=r < rows)
    tl.store(top_ptr + place + r, top, mask=r < rows)
    partial_ptr += place * D
    store_part(partial_ptr, low_y, low_y2, low_shift, r, rows, D, 0, LOW, LOW_BYTES, LOW_PAD, LOW_PACKED, LOW_UP)
    if HIGH:
        store_part(
            partial_ptr, high_y, high_y2, high_shift, r, rows, D, LOW, HIGH, HIGH_BYTES, HIGH_PAD, HIGH_PACKED, HIGH_UP
        )
