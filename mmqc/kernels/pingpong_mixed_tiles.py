"""The kernel of mixed_matmul.py for many rows on Hopper and a weight in one part: pingpong_tiles.py's ring, another epilogue.

Two parts change units in the walk over K: a consumer that does so between its products leaves the tensor cores idle.  Measured,
also with the change under the other's products, that is no faster than joined_matmul_kernel (docs/adr/0017).
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mmqc.kernels.mixed_matmul_tiles import finish_mixed_tile
from mmqc.kernels.pingpong_tiles import count_items, fill_ring, find_item, make_ring, meet, multiply_ring, write_tile


@gluon.jit
def mixed_consumer(
    which: gl.constexpr, y_desc, ring, operands, M, N, K, HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """A warpgroup, or two, that multiplies and writes."""
    y_ring, turn = ring[2], ring[5]
    x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, part_ptr, counter_ptr = operands
    other: gl.constexpr = 1 - which if CONSUMERS == 2 else -1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128 if BLOCK_N == 256 else BLOCK_N, 32])
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    steps = gl.cdiv(K, BLOCK_K)
    for item in range(which, items, CONSUMERS):
        row, col, first, last, part, inside = find_item(
            item, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
        )
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, layout)
        if CONSUMERS == 2:
            mbarrier.wait(turn.index(which), ((item // 2) & 1) ^ (1 - which))
        acc = multiply_ring(acc, ring, item * steps, last - first, other, STAGES)
        acc, mine = meet(acc, part_ptr, counter_ptr, item == rounds, inside, rest, part, PARTS, BLOCK_M, BLOCK_N, WARPS)
        if mine:
            y = finish_mixed_tile(acc, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, row + rows, col + cols,
                                  M, N, 1, HAS_BIAS)  # fmt: skip
            write_tile(y, y_desc, y_ring.index(which), row, col)
    tma.store_wait(0)


@gluon.jit
def mixed_pingpong_kernel(
    x_desc, w_desc, y_desc, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, part_ptr, counter_ptr, M, N, K,
    HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As joined_matmul_kernel with one part."""
    ring = make_ring(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CONSUMERS)
    operands = (x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, part_ptr, counter_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (mixed_consumer, (
                0, y_desc, ring, operands, M, N, K, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS,
                STAGES, WARPS, CONSUMERS)),
            (mixed_consumer, (
                1, y_desc, ring, operands, M, N, K, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS,
                STAGES, WARPS, CONSUMERS)),
            (fill_ring, (
                x_desc, w_desc, ring, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES)),
        ], [WARPS, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (mixed_consumer, (
                0, y_desc, ring, operands, M, N, K, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS,
                STAGES, WARPS, CONSUMERS)),
            (fill_ring, (
                x_desc, w_desc, ring, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES)),
        ], [1], [24])  # fmt: skip
