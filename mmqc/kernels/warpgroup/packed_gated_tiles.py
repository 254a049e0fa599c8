"""The kernel of packed_gated.py: packed_tiles.py for gate and up, whose columns of y a program has both.

    every step   wait for its slot;  load 64 rows of each weight, unpack;  start four products into gᵀ and uᵀ;  copy what comes
    at the end   y = f(g) ∘ u,  or its codes: an entry of both is in the same register of the same thread

All else is as there: slots, parts that come first and are added up, what is asked for before the wait.
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from mmqc.kernels.matmul.gated_matmul_tiles import finish_gated_tile
from mmqc.kernels.matmul.scaled_matmul_tiles import scale_sums
from mmqc.kernels.shared.early_start import await_inputs
from mmqc.kernels.shared.gluon_names import async_load
from mmqc.kernels.shared.int4_codes import int4_as_int8
from mmqc.kernels.warpgroup.packed_tiles import (
    BEHIND,
    FACTOR,
    fetch_scales,
    find_ahead,
    find_next,
    make_slots,
    prefetch_rows,
    write_shares,
)
from mmqc.kernels.warpgroup.pingpong_tiles import by_thread, count_items, from_thread, is_last, places_of_sums, take_sums


@gluon.jit
def fill_pair(
    descs, ring, slot, row, col, step, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr
):
    """Start to copy a step: both halves of x, and both weights."""
    ready, k = ring[2].index(slot), step * BLOCK_K
    mbarrier.expect(ready, 2 * (BLOCK_M + COLUMNS) * BLOCK_K)
    for i in gl.static_range(2):
        async_load(descs[2 + i], [col, k], ready, ring[1].index(2 * slot + i))
        async_load(descs[i], [row, k], ready, ring[0].index(2 * slot + i))


@gluon.jit
def take_pair(
    gate, up, step, slot, phase, here, following, descs, ring, OPERAND: gl.constexpr, BLOCK_M: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, SLOTS: gl.constexpr,
):
    """Start a step's products, and copy ahead, as ``take_step``; the next slot, its phase."""
    mbarrier.wait(ring[2].index(slot), phase)
    first, second = ring[1].index(2 * slot).load(OPERAND), ring[1].index(2 * slot + 1).load(OPERAND)
    lower, upper = ring[0].index(2 * slot).permute((1, 0)), ring[0].index(2 * slot + 1).permute((1, 0))
    low, high = int4_as_int8(first, True)
    gate = warpgroup_mma(low, lower, gate, is_async=True)
    gate = warpgroup_mma(high, upper, gate, is_async=True)
    low, high = int4_as_int8(second, True)
    up = warpgroup_mma(low, lower, up, is_async=True)
    up = warpgroup_mma(high, upper, up, is_async=True)
    ahead: gl.constexpr = SLOTS - BEHIND
    then = step + ahead
    inside = then < here[3]
    if inside | (following[2] < following[3]):
        tl.debug_barrier()  # all warps have waited for the step before the last
        row, col, coming = find_ahead(inside, then, here, following)
        fill_pair(descs, ring, (slot + ahead) % SLOTS, row, col, coming, BLOCK_M, COLUMNS, BLOCK_K)
    gate, up = warpgroup_mma_wait(4, deps=(gate, up))
    return gate, up, (slot + 1) % SLOTS, phase ^ ((slot + 1) // SLOTS)


@gluon.jit
def multiply_pairs(
    gate, up, slot, phase, here, following, descs, ring, OPERAND: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr, SLOTS: gl.constexpr,
):
    """Add the products of an item's steps, two at a time, each with registers of its own."""
    count = gl.maximum(here[3] - here[2], 0)
    for pair in range(count // 2):
        for half in gl.static_range(2):
            gate, up, slot, phase = take_pair(
                gate, up, here[2] + 2 * pair + half, slot, phase, here, following, descs, ring, OPERAND, BLOCK_M, COLUMNS,
                BLOCK_K, SLOTS,
            )
    if count % 2 == 1:
        gate, up, slot, phase = take_pair(
            gate, up, here[3] - 1, slot, phase, here, following, descs, ring, OPERAND, BLOCK_M, COLUMNS, BLOCK_K, SLOTS
        )
    gate, up = warpgroup_mma_wait(0, deps=(gate, up))
    return gate, up, slot, phase


@gluon.jit
def add_up_pair(
    gate, up, sum_ptr, counter_ptr, is_part, inside, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """``add_up`` of both."""
    mine = inside >= 0
    if PARTS > 1:  # noqa: SIM102  known when it is compiled
        if is_part:
            first, second = by_thread(gate, BLOCK_M, BLOCK_N, 4), by_thread(up, BLOCK_M, BLOCK_N, 4)
            at = places_of_sums(sum_ptr + 2 * inside * (BLOCK_M * BLOCK_N), first, 4)
            gl.atomic_add(at, first, sem="relaxed")
            gl.atomic_add(at + BLOCK_M * BLOCK_N, second, sem="relaxed")
            mine = is_last(counter_ptr + inside, PARTS)
            if mine:
                first, second = take_sums(at), take_sums(at + BLOCK_M * BLOCK_N)
                gl.store(counter_ptr + inside, 0)
            gate, up = from_thread(first, gate, BLOCK_M, BLOCK_N, 4), from_thread(second, up, BLOCK_M, BLOCK_N, 4)
    return gate, up, mine


@gluon.jit
def scaled_z(acc, s_x, s_w, b, HAS_BIAS: gl.constexpr):
    """Sums [BM, BN] of one linear -> z."""
    of_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    of_columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    z = scale_sums(acc, gl.convert_layout(s_x, of_rows), gl.convert_layout(s_w, of_columns), FACTOR)
    if HAS_BIAS:
        z += gl.convert_layout(b, of_columns)[None, :]
    return z


@gluon.jit(do_not_specialize=["M"])
def packed_gated_kernel(
    x_desc, upper_desc, w_desc, w1_desc, y_desc, w_ptr, w1_ptr, x_scale_ptr, row_ptr, w_scale_ptr, w_scale1_ptr, bias_ptr,
    bias1_ptr, next_scale_ptr, next_row_ptr, part_ptr, counter_ptr, M, N, STORED, stride_w, stride_w1,
    KIND: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, NEXT: gl.constexpr, NEXT_KIND: gl.constexpr,
    ROUND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr, BLOCK_M: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr,
    SHARES: gl.constexpr, SLOTS: gl.constexpr, LINES: gl.constexpr,
):
    """Y = f(x wᵀ) ∘ x w1ᵀ, or its codes, everything as in packed_scaled_kernel, of COLUMNS columns a tile."""
    ring = make_slots(x_desc, w_desc, y_desc, BLOCK_M, COLUMNS, BLOCK_K, SHARES, SLOTS, 2)
    of_z: gl.constexpr = gl.bfloat16 if ROUND == 1 else gl.float16 if ROUND == 2 else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    rounds, rest, items = count_items(M, N, BLOCK_M, COLUMNS, PROGRAMS, PARTS)
    steps = gl.maximum(gl.cdiv(STORED, BLOCK_K), SLOTS - BEHIND)
    descs = (x_desc, upper_desc, w_desc, w1_desc)
    here = find_next(0, items, rounds, rest, steps, M, N, BLOCK_M, COLUMNS, GROUP_M, PROGRAMS, PARTS, True)
    each: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    ahead = gl.minimum(here[1] + gl.arange(0, COLUMNS, gl.SliceLayout(1, each)), N - 1).to(gl.int64)
    prefetch_rows(w_ptr + ahead * stride_w, here[2] * BLOCK_K, STORED, LINES)
    prefetch_rows(w1_ptr + ahead * stride_w1, here[2] * BLOCK_K, STORED, LINES)
    await_inputs()
    for i in range(SLOTS - BEHIND):
        fill_pair(descs, ring, i, here[0], here[1], here[2] + i, BLOCK_M, COLUMNS, BLOCK_K)
    slot = 0
    phase = 0
    for item in range(items):
        following = find_next(item + 1, items, rounds, rest, steps, M, N, BLOCK_M, COLUMNS, GROUP_M, PROGRAMS, PARTS, True)
        s_x, s_g, b_g = fetch_scales(x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, here[0], here[1], M, N, KIND, HAS_BIAS, BLOCK_M,
                                     COLUMNS)  # arrive under the products
        _, s_u, b_u = fetch_scales(x_scale_ptr, row_ptr, w_scale1_ptr, bias1_ptr, here[0], here[1], M, N, KIND, HAS_BIAS, BLOCK_M,
                                   COLUMNS)
        gate = gl.zeros((COLUMNS, BLOCK_M), gl.int32, layout)
        up = gl.zeros((COLUMNS, BLOCK_M), gl.int32, layout)
        gate, up, slot, phase = multiply_pairs(
            gate, up, slot, phase, here, following, descs, ring, operand, BLOCK_M, COLUMNS, BLOCK_K, SLOTS
        )
        gate, up, mine = add_up_pair(gate, up, part_ptr, counter_ptr, here[6], here[5], PARTS, COLUMNS, BLOCK_M)
        if mine:
            g, u = gate.permute((1, 0)), up.permute((1, 0))
            rows = here[0] + gl.arange(0, BLOCK_M, gl.SliceLayout(1, g.type.layout))
            y = finish_gated_tile(scaled_z(g, s_x, s_g, b_g, HAS_BIAS), scaled_z(u, s_x, s_u, b_u, HAS_BIAS), next_scale_ptr,
                                  next_row_ptr, rows, rows < M, ACTIVATION, NEXT, NEXT_KIND, of_z, LOW, HIGH, PTX)
            write_shares(y.permute((1, 0)), y_desc, ring[3], here[0], here[1], SHARES)
        here = following
    tma.store_wait(0)
