"""The kernel of pingpong_gated.py: pingpong_tiles.py for gate and up, of whose columns a program has as many of both.

    a slot       a step of x, and under each other a step of COLUMNS rows of the gate's weight and of as many of up's
    at the end   y = f(g) ∘ u,  or its codes: the sums are g and u side by side, an entry of both in registers of the same thread

All else is as there: rings, turns, parts of the last round.
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mmqc.kernels.matmul.gated_matmul_tiles import finish_gated_tile
from mmqc.kernels.matmul.scaled_matmul_tiles import scale_tile
from mmqc.kernels.shared.gluon_names import async_load, reinterpret
from mmqc.kernels.shared.row_scale import row_scale_tile
from mmqc.kernels.warpgroup.pingpong_tiles import count_items, find_item, make_ring, sum_item, write_tile


@gluon.jit
def fill_pairs(
    x_desc, w_desc, w1_desc, ring, M, N, K, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):
    """The warp that copies."""
    x_ring, full, empty = ring[0], ring[3], ring[4]
    halves = reinterpret(ring[1], w_desc.dtype, [2 * STAGES, COLUMNS, BLOCK_K], w_desc.layout)
    rounds, rest, items = count_items(M, N, BLOCK_M, COLUMNS, PROGRAMS, PARTS)
    slot = 0
    phase = 1
    for item in range(items):
        row, col, first, last, _part, _inside = find_item(
            item, rounds, rest, gl.cdiv(K, BLOCK_K), M, N, BLOCK_M, COLUMNS, GROUP_M, PROGRAMS, PARTS
        )
        for step in range(first, last):
            k, ready = step * BLOCK_K, full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, (BLOCK_M + 2 * COLUMNS) * BLOCK_K)
            async_load(x_desc, [row, k], ready, x_ring.index(slot))
            async_load(w_desc, [col, k], ready, halves.index(2 * slot))
            async_load(w1_desc, [col, k], ready, halves.index(2 * slot + 1))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def halves_of(acc, like: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr):
    """Sums [BM, 2 COLUMNS] as (g, u), [BM, COLUMNS] each, laid out as products of so many columns.  Nothing moves."""
    g, u = acc.reshape((BLOCK_M, 2, COLUMNS)).permute((0, 2, 1)).split()
    return gl.convert_layout(g, like, assert_trivial=True), gl.convert_layout(u, like, assert_trivial=True)


@gluon.jit
def gated_consumer(
    which: gl.constexpr, y_desc, ring, operands, M, N, K,
    KIND: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, NEXT: gl.constexpr, NEXT_KIND: gl.constexpr,
    ROUND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr, BLOCK_M: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, CONSUMERS: gl.constexpr,
):
    """A warpgroup, or two, that multiplies and writes."""
    (x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr, next_scale_ptr, next_row_ptr, part_ptr,
     counter_ptr) = operands
    of_z: gl.constexpr = gl.bfloat16 if ROUND == 1 else gl.float16 if ROUND == 2 else gl.float32
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 32])
    rounds, rest, items = count_items(M, N, BLOCK_M, COLUMNS, PROGRAMS, PARTS)
    steps = gl.cdiv(K, BLOCK_K)
    for item in range(which, items, CONSUMERS):
        place = find_item(item, rounds, rest, steps, M, N, BLOCK_M, COLUMNS, GROUP_M, PROGRAMS, PARTS)
        rows = place[0] + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        cols = place[1] + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        s_x = row_scale_tile(x_scale_ptr, row_ptr, rows, rows < M, KIND)  # arrives under the products
        acc = gl.zeros((BLOCK_M, 2 * COLUMNS), gl.int32, wide)
        acc, mine = sum_item(acc, ring, which, item, place, rounds, rest, steps, part_ptr, counter_ptr, BLOCK_M, 2 * COLUMNS,
                             PARTS, STAGES, WARPS, CONSUMERS)
        if mine:
            g, u = halves_of(acc, layout, BLOCK_M, COLUMNS)
            g = scale_tile(g, s_x, w_scale_ptr, bias_ptr, cols, cols < N, HAS_BIAS, 1.0)
            u = scale_tile(u, s_x, w_scale1_ptr, bias1_ptr, cols, cols < N, HAS_BIAS, 1.0)
            y = finish_gated_tile(g, u, next_scale_ptr, next_row_ptr, rows, rows < M, ACTIVATION, NEXT, NEXT_KIND, of_z, LOW,
                                  HIGH, PTX)
            write_tile(y, y_desc, ring[2].index(which), place[0], place[1])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def gated_pingpong_kernel(
    x_desc, w_desc, w1_desc, y_desc, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr, next_scale_ptr,
    next_row_ptr, part_ptr, counter_ptr, M, N, K,
    KIND: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, NEXT: gl.constexpr, NEXT_KIND: gl.constexpr,
    ROUND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
):
    """Y = f(x wᵀ) ∘ x w1ᵀ, or its codes, of BLOCK_N / 2 columns a tile, everything else as in scaled_pingpong_kernel."""
    columns: gl.constexpr = BLOCK_N // 2
    ring = make_ring(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, columns, STAGES, CONSUMERS)
    operands = (x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr, bias1_ptr, next_scale_ptr, next_row_ptr,
                part_ptr, counter_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (gated_consumer, (
                0, y_desc, ring, operands, M, N, K, KIND, HAS_BIAS, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, BLOCK_M,
                columns, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES, WARPS, CONSUMERS)),
            (gated_consumer, (
                1, y_desc, ring, operands, M, N, K, KIND, HAS_BIAS, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, BLOCK_M,
                columns, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES, WARPS, CONSUMERS)),
            (fill_pairs, (
                x_desc, w_desc, w1_desc, ring, M, N, K, BLOCK_M, columns, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES)),
        ], [WARPS, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (gated_consumer, (
                0, y_desc, ring, operands, M, N, K, KIND, HAS_BIAS, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX, BLOCK_M,
                columns, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES, WARPS, CONSUMERS)),
            (fill_pairs, (
                x_desc, w_desc, w1_desc, ring, M, N, K, BLOCK_M, columns, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES)),
        ], [1], [24])
