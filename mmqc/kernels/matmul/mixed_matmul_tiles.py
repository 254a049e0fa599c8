"""Tile code and kernel of mixed_matmul.py: two scale groups in one walk over one accumulator of integers.

    acc   = sum over low k of  x_l w_l                                    int8 in int32, exact
    acc  <- round(acc f(m) g(n))     f = s_xl / s_xh    g = s_wl / s_wh   in place: the units of the high part
    acc  += sum over high k of  x_h w_h                                   int8 in int32
    y     = acc s_xh s_wh + o_xl s_wl c_l + o_xh s_wh c_h + b

Why:     a second accumulator does not fit the registers, and 8-bit codes in any other type cost twice the time of int8 or more.
Error:   the rounding costs at most s_xh s_wh / 2, less than that of one 8-bit code in a single product.
Range:   s_h >= s_l 2^(b_l - b_h - 1), of x and of w, makes low codes in units of the high part no larger than 9-bit codes are,
         so that |acc| <= 2^16 K and fits.
"""

import triton
import triton.language as tl

from mmqc.kernels.shared.program_order import grouped_tile


@triton.jit
def finish_mixed_tile(
    acc, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, rows, cols, M, N, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The epilogue: acc [BM, BN] in units of the last part -> y, float32."""
    row_mask, col_mask = rows < M, cols < N
    last: tl.constexpr = PARTS - 1
    s_x = tl.load(x_scale_ptr + rows * PARTS + last, mask=row_mask, other=0.0)
    s_w = tl.load(w_scale_ptr + cols * PARTS + last, mask=col_mask, other=0.0)
    y = acc.to(tl.float32) * s_x[:, None] * s_w[None, :]
    for p in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
        o = tl.load(x_offset_ptr + rows * PARTS + p, mask=row_mask, other=0.0)
        c = tl.load(w_sum_ptr + cols * PARTS + p, mask=col_mask, other=0).to(tl.float32)
        c = c * tl.load(w_scale_ptr + cols * PARTS + p, mask=col_mask, other=0.0)
        y += o[:, None] * c[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def store_mixed_tile(
    acc, y_ptr, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, rows, cols, M, N, stride_y,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """The epilogue, and y to memory."""
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    y = finish_mixed_tile(
        acc, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, rows, cols, M, N, PARTS, HAS_BIAS
    )
    at = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def to_high_units_tile(acc, x_scale_ptr, w_scale_ptr, rows, cols, M, N):
    """Acc [BM, BN] of the low part in units of the high part, rounded."""
    row_mask, col_mask = rows < M, cols < N
    f = tl.load(x_scale_ptr + rows * 2, mask=row_mask, other=0.0)
    x_high = tl.load(x_scale_ptr + rows * 2 + 1, mask=row_mask, other=1.0)
    f = f / tl.where(x_high > 0.0, x_high, 1.0)
    g = tl.load(w_scale_ptr + cols * 2, mask=col_mask, other=0.0)
    g = g / tl.load(w_scale_ptr + cols * 2 + 1, mask=col_mask, other=1.0)
    y = acc.to(tl.float32) * f[:, None] * g[None, :]
    return (y + tl.where(y < 0.0, -0.5, 0.5)).to(tl.int32)


@triton.jit
def joined_matmul_kernel(
    x_desc, w_desc, w_tail_desc, y_ptr, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, M, N, LOW, START, END,
    stride_y, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):
    """Persistent, one walk over both parts: copies run on under the change of units; flattened, under the epilogue too.

    w [N, END] has LOW columns, zeros to START, a multiple of BLOCK_K, and its other part; x has both parts side by side.
    A tile has BLOCK_N columns and TAIL more, as in scaled_matmul_tiles.py.
    """
    M = tl.cast(M, tl.int32)  # coordinates are; a size that only data says comes as int64
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N + TAIL)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        first = tile_n * (BLOCK_N + TAIL)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        tail = tl.zeros((BLOCK_M, TAIL if TAIL else 16), tl.int32)
        for k in range(0, END, BLOCK_K):
            if PARTS == 2:  # noqa: SIM102  known when it is compiled
                if k == START:
                    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                    cols = first + tl.arange(0, BLOCK_N)
                    acc = to_high_units_tile(acc, x_scale_ptr, w_scale_ptr, rows, cols, M, N)
                    if TAIL:
                        cols = first + BLOCK_N + tl.arange(0, TAIL)
                        tail = to_high_units_tile(tail, x_scale_ptr, w_scale_ptr, rows, cols, M, N)
            # x runs on into its other part where w has zeros
            x = x_desc.load([tile_m * BLOCK_M, tl.where(k < START, k, k - (START - LOW))])
            acc = tl.dot(x, w_desc.load([first, k]).T, acc, out_dtype=tl.int32)
            if TAIL:
                tail = tl.dot(x, w_tail_desc.load([first + BLOCK_N, k]).T, tail, out_dtype=tl.int32)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = first + tl.arange(0, BLOCK_N)
        store_mixed_tile(acc, y_ptr, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, rows, cols, M, N,
                         stride_y, PARTS, HAS_BIAS)
        if TAIL:
            cols = first + BLOCK_N + tl.arange(0, TAIL)
            store_mixed_tile(tail, y_ptr, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, rows, cols, M, N,
                             stride_y, PARTS, HAS_BIAS)


@triton.jit
def mixed_matmul_kernel(
    x_desc, w_desc, w_high_desc, y_ptr, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, M, N, LOW, HIGH, stride_y,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
):
    """Persistent: every program walks over tiles.  LOW, HIGH: channels of the two parts."""
    M = tl.cast(M, tl.int32)  # coordinates are; a size that only data says comes as int64
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for k in range(0, LOW, BLOCK_K):
            # What lies outside a weight arrives as zeros: no masks along K, and x may run on into its other part.
            x = x_desc.load([tile_m * BLOCK_M, k])
            w = w_desc.load([tile_n * BLOCK_N, k])
            acc = tl.dot(x, w.T, acc, out_dtype=tl.int32)
        if PARTS == 2:
            acc = to_high_units_tile(acc, x_scale_ptr, w_scale_ptr, rows, cols, M, N)
            for k in range(0, HIGH, BLOCK_K):
                x = x_desc.load([tile_m * BLOCK_M, LOW + k])
                w = w_high_desc.load([tile_n * BLOCK_N, k])
                acc = tl.dot(x, w.T, acc, out_dtype=tl.int32)
        store_mixed_tile(acc, y_ptr, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, rows, cols, M, N,
                         stride_y, PARTS, HAS_BIAS)
