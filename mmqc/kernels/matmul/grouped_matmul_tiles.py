"""Kernel of grouped_matmul.py: which expert a tile of rows belongs to, then the tiles of the single linears.

    tiles(e) = ceil((o[e + 1] - o[e]) / BM)        tile t is of the expert e with  sum_{i < e} tiles(i) <= t < sum_{i <= e} tiles(i)

Every program finds its expert by itself, from the offsets: nothing is read back to the host.  Rows behind the last expert's are
those of one more expert, whose result is 0.  The launch has as many programs as the worst distribution of rows needs; those too
many return.
"""

import triton
import triton.language as tl

from mmqc.kernels.matmul.group_scaled_matmul_tiles import sum_groups_tile
from mmqc.kernels.matmul.scaled_matmul_tiles import multiply_add_tile
from mmqc.kernels.matmul.weight_only_matmul_tiles import sum_codes_tile
from mmqc.kernels.shared.int4_codes import int4_as_int8
from mmqc.kernels.shared.load_tile import load_w_tile, load_x_tile


@triton.jit
def find_expert(offset_ptr, tile, S, EXPERTS, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, last row + 1) of a tile of rows; expert EXPERTS for rows of none, larger where there is no tile."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(offset_ptr + e, mask=e <= EXPERTS, other=0).to(tl.int32)
    end = tl.load(offset_ptr + e + 1, mask=e < EXPERTS, other=0).to(tl.int32)
    end = tl.where(e == EXPERTS, S, end)
    tiles = tl.where(e <= EXPERTS, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    here = e == expert
    first = tl.sum(tl.where(here, ends - tiles, 0), 0)
    row = tl.sum(tl.where(here, start, 0), 0) + (tile - first) * BLOCK_M
    return expert, row, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def integer_sums(
    x_rows, w_rows, row_mask, K, STORED, PACKED: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Exact int32 sums [BN, BM], times 16 for packed codes (int4_codes.py)."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for start in range(0, STORED, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_w_tile(w_rows, k, STORED, EVEN_K)
        x = load_x_tile(x_rows, k, row_mask, STORED, EVEN_K)
        if PACKED:
            x_high = load_x_tile(x_rows, k + STORED, row_mask, K, EVEN_K)
            w, w_high = int4_as_int8(w, PTX)
            acc = multiply_add_tile(x, w, acc, True)
            acc = multiply_add_tile(x_high, w_high, acc, True)
        else:
            acc = multiply_add_tile(x, w, acc, True)
    return acc


@triton.jit
def grouped_matmul_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, zero_ptr, bias_ptr, row_scale_ptr, offset_ptr,
    S, N, K, STORED, GROUPS, EXPERTS, stride_x, stride_e, stride_w, stride_y,
    INTEGER: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One tile of y.  STORED: columns of a stretch, so bytes in a row of w (of its first plane)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    # The tiles of columns run fastest: the programs that run together read few experts, and each expert's weight once.
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    expert, row, row_end = find_expert(offset_ptr, tile_m, S, EXPERTS, BLOCK_E, BLOCK_M)
    if expert > EXPERTS:
        return
    rows = row + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < row_end, cols < N
    y_at = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    mask = row_mask[:, None] & col_mask[None, :]
    if expert == EXPERTS:
        tl.store(y_at, tl.zeros((BLOCK_M, BLOCK_N), y_ptr.dtype.element_ty), mask=mask)
        return
    safe = tl.minimum(cols, N - 1)  # columns past N repeat the last one; the store drops them
    outputs = expert.to(tl.int64) * N
    w_rows = w_ptr + expert.to(tl.int64) * stride_e + safe.to(tl.int64)[:, None] * stride_w
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    scale_rows = (outputs + safe) * GROUPS
    if INTEGER:
        if GROUP:
            acc = sum_groups_tile(x_rows, w_rows, row_mask[:, None], scale_ptr + scale_rows, 0, STORED, K, STORED, False,
                                  BITS == 4, GROUP, ALIGNED, EVEN_K, PTX, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            acc = integer_sums(x_rows, w_rows, row_mask[:, None], K, STORED, BITS == 4, EVEN_K, PTX,
                               BLOCK_M, BLOCK_N, BLOCK_K)
        y = tl.trans(acc).to(tl.float32)
        if BITS == 4:
            y = y * (1 / 16)
        y = y * tl.load(row_scale_ptr + rows, mask=row_mask, other=0.0)[:, None]
        if GROUP == 0:
            y = y * tl.load(scale_ptr + scale_rows).to(tl.float32)[None, :]
    else:
        acc = sum_codes_tile(x_rows, w_rows, row_mask[:, None], scale_ptr, zero_ptr, scale_rows, 0, STORED, K, STORED,
                             GROUP, ALIGNED, HAS_ZERO, BITS, EVEN_K, PTX, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K)
        y = tl.trans(acc)
        if GROUP == 0:
            y = y * tl.load(scale_ptr + scale_rows).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs + safe).to(tl.float32)[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
