"""Kernel of weight_only_matmul.py: weights stay packed until they are tensor-core operands in registers.

    acc[n, m] = sum_k s[n, k // g] (w_q[n, k] - z[n, k // g]) x[m, k]

The weight is the first operand, which tensor cores take from registers, so it is unpacked where it was loaded; x is the
second, zero-padded to 16 rows.  Codes are exact in fp16 and bf16 and are summed in float32; where a step of K lies in one group
(ALIGNED), the scale multiplies the sum of the step, else every weight, which is then rounded to x's dtype as in the op.  Codes
less an int8 zero point are exact in x's dtype; less one between them, they are rounded to it.
"""

import triton
import triton.language as tl

from mmqc.kernels.matmul.linears import count_tiles, find_linear, pick
from mmqc.kernels.shared.early_start import await_inputs, prefetch_lines
from mmqc.kernels.shared.int4_codes import int4_as_float, int8_as_float, small_code_as_float
from mmqc.kernels.shared.load_tile import load_w_tile, load_x_tile
from mmqc.kernels.shared.program_order import grouped_tile
from mmqc.kernels.shared.split_k import add_parts, store_part


@triton.jit
def centred_tile(w, zero_ptr, at):
    """Codes [BN, BK] less their rows' zero points, which lie at zero_ptr + at [BN]."""
    if zero_ptr.dtype.element_ty == tl.int8:
        w = w - tl.load(zero_ptr + at).to(w.dtype)[:, None]
    else:
        w = (w.to(tl.float32) - tl.load(zero_ptr + at).to(tl.float32)[:, None]).to(w.dtype)
    return w


@triton.jit
def group_multiply_add_tile(
    w, x, acc, scale_ptr, zero_ptr, scale_rows, start, k, K,
    GROUP: tl.constexpr, ALIGNED: tl.constexpr, HAS_ZERO: tl.constexpr,
):
    """Add the product of one step: w codes [BN, BK] at columns k = start …, x [BM, BK], acc [BN, BM]."""
    if GROUP == 0:
        if HAS_ZERO:
            w = centred_tile(w, zero_ptr, scale_rows)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    elif ALIGNED:
        at = scale_rows + start // GROUP
        if HAS_ZERO:
            w = centred_tile(w, zero_ptr, at)
        part = tl.dot(w, x.T, input_precision="ieee")
        acc += part * tl.load(scale_ptr + at).to(tl.float32)[:, None]
    else:
        at = scale_rows[:, None] + (tl.minimum(k, K - 1) // GROUP)[None, :]
        wide = w.to(tl.float32)
        if HAS_ZERO:
            wide -= tl.load(zero_ptr + at).to(tl.float32)
        w = (wide * tl.load(scale_ptr + at).to(tl.float32)).to(w.dtype)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    return acc


@triton.jit
def sum_codes_tile(
    x_rows, w_rows, row_mask, scale_ptr, zero_ptr, scale_rows, first, last, K, STORED,
    GROUP: tl.constexpr, ALIGNED: tl.constexpr, HAS_ZERO: tl.constexpr, BITS: tl.constexpr, EVEN_K: tl.constexpr,
    PTX: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Float32 sums [BN, BM] over the stored columns first … last: of codes (GROUP = 0), or of codes times their groups' scales.

    x_rows [BM, 1] and w_rows [BN, 1] point to rows, scale_rows [BN] counts scales from scale_ptr; row_mask [BM, 1].
    """
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + inner
        w = load_w_tile(w_rows, k, STORED, EVEN_K)
        x = load_x_tile(x_rows, k, row_mask, tl.minimum(STORED, K), EVEN_K)
        if BITS == 4:
            high = k + STORED
            x_high = load_x_tile(x_rows, high, row_mask, K, EVEN_K)
            w, w_high = int4_as_float(w, DTYPE, PTX)
            acc = group_multiply_add_tile(w, x, acc, scale_ptr, zero_ptr, scale_rows, start, k, K,
                                          GROUP, ALIGNED, HAS_ZERO)
            acc = group_multiply_add_tile(w_high, x_high, acc, scale_ptr, zero_ptr, scale_rows, start + STORED, high, K,
                                          GROUP, ALIGNED, HAS_ZERO)
        elif BITS < 4:
            third, half = w, STORED // 2  # of 3 bits: its plane lies behind the other, and its place changes halfway
            if BITS == 3:
                third = load_w_tile(w_rows + STORED, (start % half + inner) if EVEN_K else (k % half), half, True)
            for t in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
                column = k + t * STORED
                if t > 0:
                    x = load_x_tile(x_rows, column, row_mask, tl.minimum((t + 1) * STORED, K), EVEN_K)
                part = small_code_as_float(w, third, k, half, t, BITS, DTYPE)
                acc = group_multiply_add_tile(part, x, acc, scale_ptr, zero_ptr, scale_rows, start + t * STORED, column, K,
                                              GROUP, ALIGNED, HAS_ZERO)
        else:
            w = int8_as_float(w, DTYPE, PTX)
            acc = group_multiply_add_tile(w, x, acc, scale_ptr, zero_ptr, scale_rows, start, k, K,
                                          GROUP, ALIGNED, HAS_ZERO)
    return acc


@triton.jit
def store_linear_tile(
    acc, y_ptr, scale_ptr, bias_ptr, rows, cols, M, N, stride_y, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The epilogue: acc [BM, BN], the scale per channel, the bias."""
    col_mask = cols < N
    if GROUP == 0:
        acc = acc * tl.load(scale_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(rows < M)[:, None] & col_mask[None, :])


@triton.jit
def weight_only_matmul_kernel(
    x_ptr, w_ptr, w1_ptr, w2_ptr, y_ptr, y1_ptr, y2_ptr, scale_ptr, scale1_ptr, scale2_ptr, zero_ptr,
    bias_ptr, bias1_ptr, bias2_ptr, part_ptr, counter_ptr,
    M, N, N1, N2, K, STORED, GROUPS, stride_x, stride_w, stride_y, stride_y1, stride_y2,
    LINEARS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    LINES: tl.constexpr,
):
    """One tile of y, or of one part of K.  STORED: columns of a stretch, so bytes in a row of w (of its first plane)."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), count_tiles(N, N1, N2, BLOCK_N, LINEARS)
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    which, tile_n = find_linear(tile_n, N, N1, BLOCK_N, LINEARS)
    w_ptr, scale_ptr = (
        pick(which, w_ptr, w1_ptr, w2_ptr, LINEARS),
        pick(which, scale_ptr, scale1_ptr, scale2_ptr, LINEARS),
    )
    bias_ptr, y_ptr = pick(which, bias_ptr, bias1_ptr, bias2_ptr, LINEARS), pick(which, y_ptr, y1_ptr, y2_ptr, LINEARS)
    stride_y, N = pick(which, stride_y, stride_y1, stride_y2, LINEARS), pick(which, N, N1, N2, LINEARS)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(cols, N - 1)  # columns past N repeat the last one; the store drops them
    w_rows = w_ptr + safe.to(tl.int64)[:, None] * stride_w
    scale_rows = safe * GROUPS
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    row_mask = rows[:, None] < M  # rows past M are not read: at M = 1 x would be as many bytes as w
    steps = tl.cdiv(tl.cdiv(STORED, BLOCK_K), splits)
    first, last = split * steps * BLOCK_K, tl.minimum((split + 1) * steps * BLOCK_K, STORED)
    if LINES:
        prefetch_lines(w_rows, first, last, LINES)
        await_inputs()
    acc = sum_codes_tile(x_rows, w_rows, row_mask, scale_ptr, zero_ptr, scale_rows, first, last, K, STORED,
                         GROUP, ALIGNED, HAS_ZERO, BITS, EVEN_K, PTX, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K)
    acc = tl.trans(acc)
    if not SPLIT:
        store_linear_tile(acc, y_ptr, scale_ptr, bias_ptr, rows, cols, M, N, stride_y, GROUP, HAS_BIAS)
    else:
        tiles = tiles_m * tiles_n
        done = store_part(part_ptr, counter_ptr, acc, tile, tiles, split, BLOCK_M, BLOCK_N)
        if done == splits - 1:
            total = add_parts(part_ptr, counter_ptr, tile, tiles, splits, BLOCK_M, BLOCK_N)
            store_linear_tile(total, y_ptr, scale_ptr, bias_ptr, rows, cols, M, N, stride_y, GROUP, HAS_BIAS)
