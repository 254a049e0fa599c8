"""Kernels of scaled_matmul_epilogue.py with a gate: the tiles of two linears in one program, which reads x once for both.

    g = x_q w_qᵀ …,  u = x_q w1_qᵀ …          h = f(g) ∘ u          y = h,  or its codes          [BM, BN] of each

The sums of both are in registers, so BLOCK_N is half of what one linear's tile has.  Loops are those of scaled_matmul_tiles.py.
"""

import triton
import triton.language as tl

from mmqc.kernels.matmul.epilogue_tiles import next_codes_tile
from mmqc.kernels.matmul.scaled_matmul_tiles import multiply_add_tile, scale_tile
from mmqc.kernels.shared.activation_tiles import activation_tile
from mmqc.kernels.shared.early_start import await_inputs, prefetch_lines
from mmqc.kernels.shared.int4_codes import int4_as_int8
from mmqc.kernels.shared.load_tile import load_w_tile, load_x_tile
from mmqc.kernels.shared.program_order import grouped_tile
from mmqc.kernels.shared.quantize_codes import round_tile
from mmqc.kernels.shared.row_scale import row_scale_tile
from mmqc.kernels.shared.split_k import add_parts, store_part


@triton.jit
def finish_gated_tile(
    g, u, next_scale_ptr, next_row_ptr, rows, row_mask, ACTIVATION: tl.constexpr, NEXT: tl.constexpr, NEXT_KIND: tl.constexpr,
    ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PTX: tl.constexpr,
):
    """Both z [BM, BN] -> y, float32 or codes."""
    y = round_tile(activation_tile(round_tile(g, ROUND, PTX), ACTIVATION, PTX), ROUND, PTX) * round_tile(u, ROUND, PTX)
    if NEXT:
        y = next_codes_tile(y, next_scale_ptr, next_row_ptr, rows, row_mask, NEXT_KIND, ROUND, LOW, HIGH, PTX)
    return y


@triton.jit
def store_gated_tile(
    gate, up, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr, next_scale_ptr, next_row_ptr,
    rows, cols, M, N, stride_y, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr,
    ACTIVATION: tl.constexpr, NEXT: tl.constexpr, NEXT_KIND: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, PTX: tl.constexpr,
):
    """The epilogue: sums [BM, BN] of both -> y."""
    row_mask, col_mask = rows < M, cols < N
    s_x = row_scale_tile(x_scale_ptr, row_ptr, rows, row_mask, KIND)  # [BM]
    g = scale_tile(gate, s_x, w_scale_ptr, bias_ptr, cols, col_mask, HAS_BIAS, FACTOR)
    u = scale_tile(up, s_x, w_scale1_ptr, bias1_ptr, cols, col_mask, HAS_BIAS, FACTOR)
    y = finish_gated_tile(g, u, next_scale_ptr, next_row_ptr, rows, row_mask, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX)
    at = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def gated_matmul_kernel(
    x_ptr, w_ptr, w1_ptr, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr, next_scale_ptr,
    next_row_ptr, part_ptr, counter_ptr, M, N, K, STORED, stride_x, stride_w, stride_y,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr, PACKED: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN_K: tl.constexpr, PTX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT: tl.constexpr, ACTIVATION: tl.constexpr, NEXT: tl.constexpr, NEXT_KIND: tl.constexpr,
    ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, LINES: tl.constexpr,
):
    """One tile of y, or the sums of one part of K.  STORED: bytes in a row of each w (K, or ceil(K/2) packed)."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    w_row = tl.minimum(cols, N - 1).to(tl.int64)[:, None] * stride_w  # columns past N: scaled_matmul_tiles.py
    row_mask = rows[:, None] < M
    split, splits = tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(tl.cdiv(STORED, BLOCK_K), splits)
    first, last = split * steps * BLOCK_K, tl.minimum((split + 1) * steps * BLOCK_K, STORED)
    if LINES:
        prefetch_lines(w_ptr + w_row, first, last, LINES)
        prefetch_lines(w1_ptr + w_row, first, last, LINES)
        await_inputs()
    if COLUMNS:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    up = gate
    for start in range(first, last, BLOCK_K):
        k = start + inner
        w = load_w_tile(w_ptr + w_row, k, STORED, EVEN_K)  # [BN, BK]
        w1 = load_w_tile(w1_ptr + w_row, k, STORED, EVEN_K)
        x = load_x_tile(x_rows, k, row_mask, STORED, EVEN_K)  # [BM, BK]
        if PACKED:
            x_high = load_x_tile(x_rows, k + STORED, row_mask, K, EVEN_K)
            w, w_high = int4_as_int8(w, PTX)
            gate = multiply_add_tile(x, w, gate, COLUMNS)
            gate = multiply_add_tile(x_high, w_high, gate, COLUMNS)
            w1, w1_high = int4_as_int8(w1, PTX)
            up = multiply_add_tile(x, w1, up, COLUMNS)
            up = multiply_add_tile(x_high, w1_high, up, COLUMNS)
        else:
            gate = multiply_add_tile(x, w, gate, COLUMNS)
            up = multiply_add_tile(x, w1, up, COLUMNS)
    if COLUMNS:
        gate, up = tl.trans(gate), tl.trans(up)
    if not SPLIT:
        store_gated_tile(gate, up, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr,
                         next_scale_ptr, next_row_ptr, rows, cols, M, N, stride_y, KIND, HAS_BIAS, FACTOR, ACTIVATION,
                         NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX)
    else:
        # Two tiles of partial sums: who is last with the second is last with both.
        tiles = tiles_m * tiles_n
        store_part(part_ptr, counter_ptr, gate, tile, 2 * tiles, split, BLOCK_M, BLOCK_N)
        done = store_part(part_ptr, counter_ptr, up, tile + tiles, 2 * tiles, split, BLOCK_M, BLOCK_N)
        if done == splits - 1:
            gate_sum = add_parts(part_ptr, counter_ptr, tile, 2 * tiles, splits, BLOCK_M, BLOCK_N)
            up_sum = add_parts(part_ptr, counter_ptr, tile + tiles, 2 * tiles, splits, BLOCK_M, BLOCK_N)
            store_gated_tile(gate_sum, up_sum, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr,
                             bias1_ptr, next_scale_ptr, next_row_ptr, rows, cols, M, N, stride_y, KIND, HAS_BIAS, FACTOR,
                             ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX)


@triton.jit(do_not_specialize=["M"])
def gated_matmul_descriptor_kernel(
    x_desc, w_desc, w1_desc, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr, next_scale_ptr,
    next_row_ptr, M, N, K, stride_y,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr, PTX: tl.constexpr, ACTIVATION: tl.constexpr,
    NEXT: tl.constexpr, NEXT_KIND: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):
    """Persistent, operands by TMA."""
    M = tl.cast(M, tl.int32)  # coordinates are; a size that only data says comes as int64
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        gate, up = tl.zeros((BLOCK_M, BLOCK_N), tl.int32), tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([tile_m * BLOCK_M, k])
            w = w_desc.load([tile_n * BLOCK_N, k])
            w1 = w1_desc.load([tile_n * BLOCK_N, k])
            gate = multiply_add_tile(x, w, gate, False)
            up = multiply_add_tile(x, w1, up, False)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        store_gated_tile(gate, up, y_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr,
                         next_scale_ptr, next_row_ptr, rows, cols, M, N, stride_y, KIND, HAS_BIAS, 1.0, ACTIVATION, NEXT,
                         NEXT_KIND, ROUND, LOW, HIGH, PTX)
