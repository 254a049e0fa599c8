"""Kernel of byte_matmul.py: 8-bit weights become operands of x's type in registers, on their way from a ring of slots.

    every step   wait for its slot;  load w, widen;  start its products into yᵀ;  copy what comes;  wait for the step before

As packed_tiles.py, which says why, and in what order; with a weight of bytes, and x in 16 bits.
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mmqc.kernels.shared.gluon_names import async_load
from mmqc.kernels.shared.int4_codes import int8_as_64ths, int8_as_float
from mmqc.kernels.warpgroup.packed_tiles import BEHIND, find_ahead, find_next, write_shares
from mmqc.kernels.warpgroup.pingpong_tiles import count_items, meet


@gluon.jit
def expect_step(ready, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    """The bytes of a step: two for an entry of x, one for one of w."""
    mbarrier.expect(ready, (2 * BLOCK_M + BLOCK_N) * BLOCK_K)


@gluon.jit
def widen(codes, DTYPE: gl.constexpr):
    """Codes as numbers of x's type, or ``units`` of them."""
    if gl.bfloat16 == DTYPE:
        return int8_as_64ths(codes)
    return int8_as_float(codes, DTYPE, True)


@gluon.constexpr_function
def units(dtype):
    """How many of ``widen``'s results make one."""
    return 64.0 if dtype == gl.bfloat16 else 1.0


@gluon.jit
def take_step(
    acc, step, slot, phase, here, following, x_desc, w_desc, ring, OPERAND: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SLOTS: gl.constexpr,
):
    """Start a step's products, and copy ahead, in this item or in the next; the next slot, its phase."""
    x_ring, w_ring, full = ring[0], ring[1], ring[2]
    mbarrier.wait(full.index(slot), phase)
    w = widen(w_ring.index(slot).load(OPERAND), x_ring.dtype)
    acc = warpgroup_mma(w, x_ring.index(slot).permute((1, 0)), acc, is_async=True)
    ahead: gl.constexpr = SLOTS - BEHIND
    then = step + ahead
    inside = then < here[3]
    if inside | (following[2] < following[3]):
        tl.debug_barrier()  # all warps have waited for the step before the last
        to = (slot + ahead) % SLOTS
        ready = full.index(to)
        row, col, coming = find_ahead(inside, then, here, following)
        k = coming * BLOCK_K
        expect_step(ready, BLOCK_M, BLOCK_N, BLOCK_K)
        async_load(w_desc, [col, k], ready, w_ring.index(to))
        async_load(x_desc, [row, k], ready, x_ring.index(to))
    acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc, (slot + 1) % SLOTS, phase ^ ((slot + 1) // SLOTS)


@gluon.jit
def multiply_steps(
    acc, slot, phase, here, following, x_desc, w_desc, ring, OPERAND: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SLOTS: gl.constexpr,
):
    """Add the products of item ``here``; as ``take_step``."""
    first, last = here[2], here[3]
    count = last - first
    for pair in range(count // 2):
        for half in gl.static_range(2):  # each with registers of its own
            acc, slot, phase = take_step(
                acc, first + 2 * pair + half, slot, phase, here, following, x_desc, w_desc, ring, OPERAND, BLOCK_M, BLOCK_N,
                BLOCK_K, SLOTS,
            )
    if count % 2 == 1:
        acc, slot, phase = take_step(
            acc, last - 1, slot, phase, here, following, x_desc, w_desc, ring, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K, SLOTS
        )
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, slot, phase


@gluon.jit(do_not_specialize=["M"])
def byte_kernel(
    x_desc, w_desc, y_desc, w_scale_ptr, bias_ptr, part_ptr, counter_ptr, M, N, K, HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr,
    PARTS: gl.constexpr, SHARES: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
):
    """Y = x (s w)ᵀ + b of w [N, K] int8, in float32."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [SLOTS, BLOCK_N, BLOCK_K], w_desc.layout)
    y_tile = gl.allocate_shared_memory(y_desc.dtype, [BLOCK_M // SHARES, BLOCK_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gdc_wait()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    ring = (x_ring, w_ring, full)
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    steps = gl.maximum(gl.cdiv(K, BLOCK_K), SLOTS - BEHIND)
    here = find_next(0, items, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS, False)
    for i in range(SLOTS - BEHIND):
        ready = full.index(i)
        expect_step(ready, BLOCK_M, BLOCK_N, BLOCK_K)
        async_load(w_desc, [here[1], (here[2] + i) * BLOCK_K], ready, w_ring.index(i))
        async_load(x_desc, [here[0], (here[2] + i) * BLOCK_K], ready, x_ring.index(i))
    slot = 0
    phase = 0
    for item in range(items):
        following = find_next(item + 1, items, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS, False)
        cols = here[1] + gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [WARPS], [0]))
        s_w = gl.load(w_scale_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)  # arrive under the products
        b = s_w
        if HAS_BIAS:
            b = gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
        acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout)
        acc, slot, phase = multiply_steps(
            acc, slot, phase, here, following, x_desc, w_desc, ring, operand, BLOCK_M, BLOCK_N, BLOCK_K, SLOTS
        )
        acc, mine = meet(acc, part_ptr, counter_ptr, here[6], here[5], rest, here[4], PARTS, BLOCK_N, BLOCK_M, WARPS)
        if mine:
            across: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
            y = acc * gl.convert_layout(s_w * units(x_ring.dtype), across)[:, None]
            if HAS_BIAS:
                y += gl.convert_layout(b, across)[:, None]
            write_shares(y, y_desc, y_tile, here[0], here[1], SHARES)
        here = following
    tma.store_wait(0)
