"""Write a stored weight out once, for matmuls with so many rows that this costs nothing next to them.

    out[n, k] = w_q[n, k]                          int8, fp8 or fp16, from packed codes (ops/pack.py)
    out[n, k] = w_q[n, k] t[n, k // g]             int8, where that holds the product
    out[n, k] = (w_q[n, k] - z[n, k // g]) s[n, k // g]     fp16, bf16, fp32, from codes of 2, 3, 4 or 8 bits
    out[n]    = [low[n], zeros, high[n]]       int8, of a weight in two parts, the second from a column of its own on, and
    columns[:, n] = s_l / s_h, s_h, s_l c_l, s_h c_h        float32, what its product needs of that row

Shapes:  w_q uint8 [N, packed_width] or int8 [N, K]   s, z [N] or [N, ceil(K/g)]   t int8 [N, ceil(K/g)]   out [N, K]
         z int8 or float16
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx
from mmqc.kernels.shared.int4_codes import int4_as_codes
from mmqc.kernels.shared.launch import Launch
from mmqc.ops.pack import stretch

TILE_BYTES = 8192


@triton.jit
def unpack_weight_kernel(
    w_ptr, out_ptr, scale_ptr, zero_ptr, N, K, ROW, STORED, GROUPS,
    BITS: tl.constexpr, SCALED: tl.constexpr, TIMES: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):
    """BLOCK_K stored bytes of one row, which has ROW of them; STORED: columns of a stretch (ops/pack.py)."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + n * ROW + at, mask=at < STORED, other=0).to(tl.int32)
    third = w
    if BITS == 3:
        third = tl.load(w_ptr + n * ROW + STORED + at % (STORED // 2)).to(tl.int32)
    for t in tl.static_range(1 if BITS == 8 else 2 if BITS == 4 else 4):  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
        codes, k = w, at + t * STORED
        if BITS == 4:
            codes = ((w >> (4 * t)) & 15) - 8
        elif BITS == 2:
            codes = ((w >> (2 * t)) & 3) - 2
        elif BITS == 3:
            place = 2 * t + (at >= STORED // 2).to(tl.int32)
            codes = ((w >> (2 * t)) & 3) + ((third >> place) & 1) * 4 - 4
        mask = (at < STORED) & (k < K)
        if SCALED:
            group = n * GROUPS + (k // GROUP if GROUP else k * 0)
            value = codes.to(tl.float32)
            if HAS_ZERO:
                value -= tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
            value *= tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + n * K + k, value.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            if TIMES:
                # CHUNK columns share a group: one load for what a thread has in a row
                first = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
                group = scale_ptr + n * GROUPS + (first + t * STORED) // GROUP
                times = tl.load(group, mask=(first < STORED) & (first + t * STORED < K), other=0).to(tl.int32)
                codes = tl.reshape(tl.reshape(codes, (BLOCK_K // CHUNK, CHUNK)) * times[:, None], (BLOCK_K,))
            if out_ptr.dtype.element_ty != tl.int8:  # floating point of 8 or 16 bits holds these codes exactly
                codes = codes.to(tl.float32)
            tl.store(out_ptr + n * K + k, codes.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def unpack_int4_kernel(
    w_ptr, out_ptr, N, K, ROW, STORED, PTX: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """C bytes of R rows, as int8 codes: several loads of a thread are on their way at once."""
    n = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    at = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    wide = n.to(tl.int64)
    packed = tl.load(w_ptr + wide * ROW + at, mask=(n < N) & (at < STORED), other=0)
    low, high = int4_as_codes(packed, PTX)  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
    tl.store(out_ptr + wide * K + at, low, mask=(n < N) & (at < STORED))
    tl.store(out_ptr + wide * K + (at + STORED), high, mask=(n < N) & (at < K - STORED))


@triton.jit
def join_parts_kernel(
    low_ptr, high_ptr, out_ptr, scale_ptr, sum_ptr, column_ptr, N, K, HIGH, START, ROW, PTX: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):
    """C bytes of R rows of ROW packed codes for K columns, then zeros to START, and as many columns of the other part."""
    n = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    at = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    wide = n.to(tl.int64)
    out = out_ptr + wide * (START + HIGH)
    packed = tl.load(low_ptr + wide * ROW + at, mask=(n < N) & (at < ROW), other=0)
    low, high = int4_as_codes(packed, PTX)  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
    tl.store(out + at, low, mask=(n < N) & (at < ROW))
    tl.store(out + (at + ROW), tl.where(at + ROW < K, high, 0), mask=(n < N) & (at < ROW) & (at + ROW < START))
    tl.store(out + (at + 2 * ROW), tl.zeros((R, C), tl.int8), mask=(n < N) & (at + 2 * ROW < START))
    whole = tl.load(high_ptr + wide * HIGH + at, mask=(n < N) & (at < HIGH), other=0)
    tl.store(out + (at + START), whole, mask=(n < N) & (at < HIGH))
    if tl.program_id(1) == 0:
        row = tl.program_id(0) * R + tl.arange(0, R)
        here = row < N
        s_l, s_h = tl.load(scale_ptr + 2 * row, mask=here), tl.load(scale_ptr + 2 * row + 1, mask=here, other=1.0)
        c_l, c_h = tl.load(sum_ptr + 2 * row, mask=here), tl.load(sum_ptr + 2 * row + 1, mask=here)
        tl.store(column_ptr + row, s_l / s_h, mask=here)
        tl.store(column_ptr + N + row, s_h, mask=here)
        tl.store(column_ptr + 2 * N + row, s_l * c_l.to(tl.float32), mask=here)
        tl.store(column_ptr + 3 * N + row, s_h * c_h.to(tl.float32), mask=here)


def unpack_weight(
    w_q: Tensor, k: int, *, bits: int, dtype: torch.dtype = torch.int8, scale: Tensor | None = None,
    zero: Tensor | None = None, group_size: int = 0,
) -> Tensor:
    """The weight [N, K] in ``dtype``: its codes, or with ``scale`` the numbers that they stand for (int8: codes times scale)."""
    out = torch.empty(w_q.shape[0], k, dtype=dtype, device=w_q.device)
    unpack_launch(w_q, out, bits, scale, zero, group_size).run()
    return out


def unpack_launch(
    w_q: Tensor, out: Tensor, bits: int, scale: Tensor | None = None, zero: Tensor | None = None, group_size: int = 0
) -> Launch:
    """Fill ``out`` [N, K]."""
    (n, row), k = w_q.shape, out.shape[1]
    stored = stretch(k, bits)
    if bits == 4 and scale is None and out.dtype == torch.int8:
        columns = 128 if stored % 256 else 256
        rows = TILE_BYTES // columns
        args = dict(w_ptr=w_q, out_ptr=out, N=n, K=k, ROW=row, STORED=stored)
        constants = dict(PTX=has_inline_ptx(w_q.device), R=rows, C=columns)
        grid = (ceil_div(n, rows), ceil_div(stored, columns))
        return Launch(unpack_int4_kernel, grid, args, constants, ("out_ptr",), 4, 3)
    block = min(4096, max(16, triton.next_power_of_2(stored)))
    args = dict(
        w_ptr=w_q, out_ptr=out, scale_ptr=out if scale is None else scale, zero_ptr=out if zero is None else zero,
        N=n, K=k, ROW=row, STORED=stored, GROUPS=scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1,
    )
    times = scale is not None and out.dtype == torch.int8
    constants = dict(
        BITS=bits, SCALED=scale is not None and not times, TIMES=times, HAS_ZERO=zero is not None, GROUP=group_size,
        BLOCK_K=block, CHUNK=math.gcd(16, group_size, stored) if times else 1,
    )
    return Launch(unpack_weight_kernel, (n, ceil_div(stored, block)), args, constants, ("out_ptr",), 4, 3)


def join_launch(low: Tensor, high: Tensor, scale: Tensor, sums: Tensor, out: Tensor, columns: Tensor, k: int) -> Launch:
    """Fill ``out`` [N, START + H] from packed ``low`` of k columns and int8 ``high`` [N, H], and ``columns`` [4, N].

    By wide tiles: on an H200 they write rows of 3,648 bytes at 2.8 TB/s, tiles of 128 columns at 2.3, and others alike.
    """
    (n, row), width = low.shape, high.shape[1]
    wide = min(1024, max(128, triton.next_power_of_2(row)))
    rows = TILE_BYTES // wide
    args = dict(
        low_ptr=low, high_ptr=high, out_ptr=out, scale_ptr=scale, sum_ptr=sums, column_ptr=columns, N=n, K=k, HIGH=width,
        START=out.shape[1] - width, ROW=row,
    )
    constants = dict(PTX=has_inline_ptx(low.device), R=rows, C=wide)
    grid = (ceil_div(n, rows), ceil_div(max(row, width), wide))
    return Launch(join_parts_kernel, grid, args, constants, ("out_ptr", "column_ptr"), 4, 3)
