"""Tile code and kernels of group_scaled_matmul.py: every group of K has an int32 sum of its own, its scale multiplies that.

    C_j[n, m] = sum over k of group j of w_q[n, k] x_q[m, k]        tensor cores, int32
    float     acc += float(C_j) s[n, j]                             a conversion and a fused multiply-add an element and group
    integer   acc += C_j t[n, j]                                    one integer multiply-add; acc is converted once, at the end

Accumulators lie as [BN, BM]: a thread of a tensor-core tile then has two rows n of 64, so two scales a group and no shuffle.
A step of K that lies in one group (ALIGNED) is one product; else each of its groups is multiplied with the others' x set to 0.
Source: Integer Scale, arXiv:2405.14597, table 2.
"""

import triton
import triton.language as tl

from mmqc.kernels.matmul.linears import count_tiles, find_linear, pick
from mmqc.kernels.shared.int4_codes import int4_as_codes, int4_as_int8
from mmqc.kernels.shared.load_tile import load_w_tile, load_x_tile
from mmqc.kernels.shared.program_order import grouped_tile
from mmqc.kernels.shared.row_scale import row_scale_tile
from mmqc.kernels.shared.split_k import add_parts, store_part


@triton.jit
def add_group_tile(acc, part, scale):
    """Add part [BN, BM] int32 times scale [BN] to acc, in acc's type."""
    return acc + part.to(acc.dtype) * scale.to(acc.dtype)[:, None]


@triton.jit
def multiply_groups_tile(
    w, x, acc, scale_rows, start, k, limit, GROUP: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Add the products of one step: w codes [BN, BK] at columns k = start …, below limit; x [BM, BK], acc [BN, BM]."""
    if ALIGNED:
        scale = tl.load(scale_rows + start // GROUP)  # in front of the product, under which it arrives
        acc = add_group_tile(acc, tl.dot(w, x.T, out_dtype=tl.int32), scale)
    else:
        last = (tl.minimum(start + BLOCK_K, limit) + GROUP - 1) // GROUP
        for j in range(start // GROUP, last):
            inside = tl.where((k // GROUP == j)[None, :], x, 0)
            acc = add_group_tile(acc, tl.dot(w, inside.T, out_dtype=tl.int32), tl.load(scale_rows + j))
    return acc


@triton.jit
def sum_groups_tile(
    x_rows, w_rows, row_mask, scale_rows, first, last, K, STORED, INTEGER: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr, ALIGNED: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Sums [BN, BM] over the stored columns first … last of groups' exact int32 sums times their scales, at ``scale_rows`` [BN].

    INTEGER: int32, of integer scales; else float32, times 16 for packed codes (int4_codes.py).
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if INTEGER else tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_w_tile(w_rows, k, STORED, EVEN_K)  # [BN, BK]
        x = load_x_tile(x_rows, k, row_mask, tl.minimum(STORED, K), EVEN_K)  # [BM, BK]
        if PACKED:
            high = k + STORED
            x_high = load_x_tile(x_rows, high, row_mask, K, EVEN_K)
            if INTEGER:
                w, w_high = int4_as_codes(w, PTX)
            else:
                w, w_high = int4_as_int8(w, PTX)
            acc = multiply_groups_tile(w, x, acc, scale_rows, start, k, STORED, GROUP, ALIGNED, BLOCK_K)
            acc = multiply_groups_tile(
                w_high, x_high, acc, scale_rows, start + STORED, high, K, GROUP, ALIGNED, BLOCK_K
            )
        else:
            acc = multiply_groups_tile(w, x, acc, scale_rows, start, k, K, GROUP, ALIGNED, BLOCK_K)
    return acc


@triton.jit
def store_grouped_tile(
    acc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, rows, cols, M, N, stride_y,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, INTEGER: tl.constexpr, FACTOR: tl.constexpr,
):
    """The epilogue: acc [BM, BN] -> y."""
    row_mask, col_mask = rows < M, cols < N
    y = acc.to(tl.float32)
    if FACTOR != 1.0:
        y = y * FACTOR
    y = y * row_scale_tile(x_scale_ptr, row_ptr, rows, row_mask, KIND)[:, None]
    if INTEGER:
        y = y * tl.load(w_scale_ptr + cols, mask=col_mask, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def group_scaled_matmul_kernel(
    x_ptr, w_ptr, w1_ptr, w2_ptr, y_ptr, y1_ptr, y2_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, w_scale2_ptr,
    group_ptr, group1_ptr, group2_ptr, bias_ptr, bias1_ptr, bias2_ptr, part_ptr, counter_ptr,
    M, N, N1, N2, K, STORED, GROUPS, stride_x, stride_w, stride_y, stride_y1, stride_y2,
    LINEARS: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, INTEGER: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr, ALIGNED: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
):
    """One tile of y, or of one part of K.  STORED: bytes in a row of w (K, or ceil(K/2) packed)."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), count_tiles(N, N1, N2, BLOCK_N, LINEARS)
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    which, tile_n = find_linear(tile_n, N, N1, BLOCK_N, LINEARS)
    w_ptr, y_ptr = pick(which, w_ptr, w1_ptr, w2_ptr, LINEARS), pick(which, y_ptr, y1_ptr, y2_ptr, LINEARS)
    w_scale_ptr = pick(which, w_scale_ptr, w_scale1_ptr, w_scale2_ptr, LINEARS)
    group_ptr = pick(which, group_ptr, group1_ptr, group2_ptr, LINEARS)
    bias_ptr = pick(which, bias_ptr, bias1_ptr, bias2_ptr, LINEARS)
    stride_y, N = pick(which, stride_y, stride_y1, stride_y2, LINEARS), pick(which, N, N1, N2, LINEARS)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(cols, N - 1)  # columns past N repeat the last one; the store drops them
    w_rows = w_ptr + safe.to(tl.int64)[:, None] * stride_w
    scale_rows = group_ptr + safe * GROUPS
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    row_mask = rows[:, None] < M
    steps = tl.cdiv(tl.cdiv(STORED, BLOCK_K), splits)
    first, last = split * steps * BLOCK_K, tl.minimum((split + 1) * steps * BLOCK_K, STORED)
    acc = sum_groups_tile(x_rows, w_rows, row_mask, scale_rows, first, last, K, STORED, INTEGER, PACKED, GROUP, ALIGNED,
                          EVEN_K, PTX, BLOCK_M, BLOCK_N, BLOCK_K)
    acc = tl.trans(acc)
    factor: tl.constexpr = 1 / 16 if PACKED and not INTEGER else 1.0
    if not SPLIT:
        store_grouped_tile(acc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, rows, cols, M, N, stride_y,
                           KIND, HAS_BIAS, INTEGER, factor)
    else:
        tiles = tiles_m * tiles_n
        done = store_part(part_ptr, counter_ptr, acc, tile, tiles, split, BLOCK_M, BLOCK_N)
        if done == splits - 1:
            total = add_parts(part_ptr, counter_ptr, tile, tiles, splits, BLOCK_M, BLOCK_N)
            store_grouped_tile(total, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, rows, cols, M, N, stride_y,
                               KIND, HAS_BIAS, INTEGER, factor)


@triton.jit
def group_scaled_matmul_descriptor_kernel(
    x_desc, w_desc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, group_ptr, bias_ptr, M, N, K, GROUPS, stride_y,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, INTEGER: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,
):
    """One tile of y, weights of 8 bits by TMA; BLOCK_K divides GROUP.  What lies outside arrives as zeros.

    With two HALVES a tile has 2 BLOCK_N columns, whose groups are summed one half after the other in the same registers.
    """
    M = tl.cast(M, tl.int32)  # coordinates are; a size that only data says comes as int64
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N * HALVES)
    tile_m, tile_n = grouped_tile(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    first_row, first = tile_m * BLOCK_M, tile_n * (BLOCK_N * HALVES)
    cols = first + tl.arange(0, BLOCK_N)
    scale_rows = group_ptr + tl.minimum(cols, N - 1) * GROUPS
    more_rows = group_ptr + tl.minimum(cols + BLOCK_N, N - 1) * GROUPS
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if INTEGER else tl.float32)
    acc_more = acc
    for start in range(0, K, BLOCK_K):
        scale = tl.load(scale_rows + start // GROUP)
        x = x_desc.load([first_row, start])
        w = w_desc.load([first, start])
        acc = add_group_tile(acc, tl.dot(w, x.T, out_dtype=tl.int32), scale)
        if HALVES == 2:
            scale = tl.load(more_rows + start // GROUP)
            w = w_desc.load([first + BLOCK_N, start])
            acc_more = add_group_tile(acc_more, tl.dot(w, x.T, out_dtype=tl.int32), scale)
    rows = first_row + tl.arange(0, BLOCK_M)
    store_grouped_tile(tl.trans(acc), y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, rows, cols, M, N, stride_y,
                       KIND, HAS_BIAS, INTEGER, 1.0)
    if HALVES == 2:
        store_grouped_tile(tl.trans(acc_more), y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, rows, cols + BLOCK_N, M, N,
                           stride_y, KIND, HAS_BIAS, INTEGER, 1.0)
