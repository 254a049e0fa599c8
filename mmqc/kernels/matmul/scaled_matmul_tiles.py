"""Tile code and kernels of scaled_matmul.py: integer or fp8 sums, then an epilogue in float32.

    acc[m, n] = sum_k x_q[m, k] w_q[n, k]
    z = acc c s_x(m) s_w[n] + b[n] + r[m, n]          c = 1, or the factor that unpacked codes carry (int4_codes.py)
    h = z,  or  f(z),  or  f(r) ∘ z, with r no part of z where it is a gate
    y = h,  or  quantize(h, s_next(m))                epilogue_tiles.py

Accumulators: int32 (exact) for int8, float32 for fp8.  Offsets of rows are int64.
"""

import triton
import triton.language as tl

from mmqc.kernels.matmul.epilogue_tiles import add_low_rank_tile, next_codes_tile
from mmqc.kernels.matmul.linears import count_tiles, find_linear, pick
from mmqc.kernels.shared.activation_tiles import NONE, activation_tile
from mmqc.kernels.shared.early_start import await_inputs, prefetch_lines
from mmqc.kernels.shared.int4_codes import int4_as_fp8, int4_as_int8
from mmqc.kernels.shared.load_tile import load_w_tile, load_x_tile
from mmqc.kernels.shared.program_order import grouped_tile
from mmqc.kernels.shared.quantize_codes import round_tile
from mmqc.kernels.shared.row_scale import row_scale_tile
from mmqc.kernels.shared.split_k import add_parts, store_part


@triton.jit
def multiply_add_tile(x, w, acc, COLUMNS: tl.constexpr):
    """Add x wᵀ, or w xᵀ with COLUMNS, to acc: int8 into int32, fp8 into float32."""
    if COLUMNS:
        a, b = w, x.T
    else:
        a, b = x, w.T
    if acc.dtype == tl.int32:
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(a, b, acc, out_dtype=tl.float32)  # of fp8 Hopper's units keep about 14 bits while they accumulate
    return acc


@triton.jit
def scale_tile(
    acc, s_x, w_scale_ptr, bias_ptr, cols, col_mask, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr
):
    """Sums [BM, BN] and s_x [BM] -> z, float32."""
    s_w = tl.load(w_scale_ptr + cols, mask=col_mask, other=0.0)  # [BN]
    z = scale_sums(acc, s_x, s_w, FACTOR)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def scale_sums(acc, s_x, s_w, FACTOR: tl.constexpr):
    """``scale_tile``, its scales [BM] and [BN] at hand, without a bias."""
    z = acc.to(tl.float32)
    if FACTOR != 1.0:
        z = z * FACTOR
    return z * s_x[:, None] * s_w[None, :]


@triton.jit
def finish_scaled_tile(
    acc, s_x, w_scale_ptr, bias_ptr, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, N,
    HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr, ACTIVATION: tl.constexpr, NEXT: tl.constexpr, NEXT_KIND: tl.constexpr,
    ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PTX: tl.constexpr, RANK: tl.constexpr,
):
    """The epilogue: acc [BM, BN] and s_x [BM] -> y, float32 or codes."""
    y = scale_tile(acc, s_x, w_scale_ptr, bias_ptr, cols, cols < N, HAS_BIAS, FACTOR)
    return finish_tile(y, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, N, ACTIVATION, NEXT,
                       NEXT_KIND, ROUND, LOW, HIGH, PTX, RANK)


@triton.jit
def finish_tile(
    y, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, N, ACTIVATION: tl.constexpr, NEXT: tl.constexpr,
    NEXT_KIND: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PTX: tl.constexpr, RANK: tl.constexpr,
):
    """Z [BM, BN], but for the other terms of a sum -> y, float32 or codes."""
    row_mask, col_mask = rows < M, cols < N
    if RANK:
        y = add_low_rank_tile(y, low_x_ptr, low_w_ptr, rows, row_mask, cols, col_mask, RANK)
    if ACTIVATION != NONE:
        y = activation_tile(round_tile(y, ROUND, PTX), ACTIVATION, PTX)
    if NEXT:
        y = next_codes_tile(y, next_scale_ptr, next_row_ptr, rows, row_mask, NEXT_KIND, ROUND, LOW, HIGH, PTX)
    return y


@triton.jit
def store_scaled_tile(
    acc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr,
    rows, cols, M, N, stride_y,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr, ACTIVATION: tl.constexpr, NEXT: tl.constexpr,
    NEXT_KIND: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PTX: tl.constexpr, RANK: tl.constexpr,
):
    """The epilogue, and y to memory."""
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    s_x = row_scale_tile(x_scale_ptr, row_ptr, rows, rows < M, KIND)
    y = finish_scaled_tile(acc, s_x, w_scale_ptr, bias_ptr, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr,
                           rows, cols, M, N, HAS_BIAS, FACTOR, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, RANK)
    at = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled_matmul_kernel(
    x_ptr, w_ptr, w1_ptr, w2_ptr, y_ptr, y1_ptr, y2_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, w_scale2_ptr,
    bias_ptr, bias1_ptr, bias2_ptr, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr, part_ptr, counter_ptr,
    M, N, N1, N2, K, STORED, stride_x, stride_w, stride_y, stride_y1, stride_y2,
    LINEARS: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr,
    PACKED: tl.constexpr, COLUMNS: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr, ACTIVATION: tl.constexpr, NEXT: tl.constexpr, NEXT_KIND: tl.constexpr, ROUND: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, RANK: tl.constexpr, LINES: tl.constexpr,
):
    """One tile of y, or of one part of K.  STORED: bytes in a row of w (K, or ceil(K/2) packed)."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), count_tiles(N, N1, N2, BLOCK_N, LINEARS)
    tile = tl.program_id(0)
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    which, tile_n = find_linear(tile_n, N, N1, BLOCK_N, LINEARS)
    w_ptr, w_scale_ptr = (
        pick(which, w_ptr, w1_ptr, w2_ptr, LINEARS),
        pick(which, w_scale_ptr, w_scale1_ptr, w_scale2_ptr, LINEARS),
    )
    bias_ptr, y_ptr = pick(which, bias_ptr, bias1_ptr, bias2_ptr, LINEARS), pick(which, y_ptr, y1_ptr, y2_ptr, LINEARS)
    stride_y, N = pick(which, stride_y, stride_y1, stride_y2, LINEARS), pick(which, N, N1, N2, LINEARS)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    # Columns past N read the last row again, which the store drops; rows past M are not read: a skinny x is mostly that.
    w_rows = w_ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * stride_w
    row_mask = rows[:, None] < M
    split, splits = tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(tl.cdiv(STORED, BLOCK_K), splits)
    first, last = split * steps * BLOCK_K, tl.minimum((split + 1) * steps * BLOCK_K, STORED)
    if LINES:
        prefetch_lines(w_rows, first, last, LINES)
        await_inputs()
    if COLUMNS:
        acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(first, last, BLOCK_K):
        k = start + inner
        w = load_w_tile(w_rows, k, STORED, EVEN_K)  # [BN, BK]
        x = load_x_tile(x_rows, k, row_mask, STORED, EVEN_K)  # [BM, BK]
        if PACKED:
            x_high = load_x_tile(x_rows, k + STORED, row_mask, K, EVEN_K)
            if x.dtype == tl.int8:
                w, w_high = int4_as_int8(w, PTX)
            else:
                w, w_high = int4_as_fp8(w)
            acc = multiply_add_tile(x, w, acc, COLUMNS)
            acc = multiply_add_tile(x_high, w_high, acc, COLUMNS)
        else:
            acc = multiply_add_tile(x, w, acc, COLUMNS)
    if COLUMNS:
        acc = tl.trans(acc)
    if not SPLIT:
        store_scaled_tile(acc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr,
                          next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, N, stride_y, KIND, HAS_BIAS,
                          FACTOR, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, RANK)
    else:
        tiles = tiles_m * tiles_n
        done = store_part(part_ptr, counter_ptr, acc, tile, tiles, split, BLOCK_M, BLOCK_N)
        if done == splits - 1:
            total = add_parts(part_ptr, counter_ptr, tile, tiles, splits, BLOCK_M, BLOCK_N)
            store_scaled_tile(total, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr,
                              next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, N, stride_y, KIND, HAS_BIAS,
                              FACTOR, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, RANK)


@triton.jit(do_not_specialize=["M"])
def scaled_matmul_descriptor_kernel(
    x_desc, w_desc, w_tail_desc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr,
    next_row_ptr, low_x_ptr, low_w_ptr, M, N, K, stride_y,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr, ACTIVATION: tl.constexpr, NEXT: tl.constexpr, NEXT_KIND: tl.constexpr,
    ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PTX: tl.constexpr, RANK: tl.constexpr,
):
    """Persistent: every program walks over tiles, so the next tile's copies run under this tile's epilogue.

    A tile has BLOCK_N columns and TAIL more, which are a product of their own with the same rows of x.
    """
    M = tl.cast(M, tl.int32)  # coordinates are; a size that only data says comes as int64
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N + TAIL)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        first = tile_n * (BLOCK_N + TAIL)
        acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        tail = tl.zeros((BLOCK_M, TAIL if TAIL else 16), ACC)
        for k in range(0, K, BLOCK_K):
            # What lies outside the tensor arrives as zeros: no masks along K.
            x = x_desc.load([tile_m * BLOCK_M, k])
            acc = multiply_add_tile(x, w_desc.load([first, k]), acc, False)
            if TAIL:
                tail = multiply_add_tile(x, w_tail_desc.load([first + BLOCK_N, k]), tail, False)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = first + tl.arange(0, BLOCK_N)
        store_scaled_tile(acc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr,
                          next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, N, stride_y, KIND, HAS_BIAS,
                          1.0, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, RANK)
        if TAIL:
            cols = first + BLOCK_N + tl.arange(0, TAIL)
            store_scaled_tile(tail, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr,
                              next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, N, stride_y, KIND, HAS_BIAS,
                              1.0, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, RANK)
