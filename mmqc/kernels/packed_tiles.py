"""Kernels of packed_matmul.py: 4-bit weights that are unpacked in registers, the operand from which a warpgroup multiplies.

    every step   wait for its slot;  load w, unpack;  start two products into yᵀ;  wait for those of the step before;  fill its slot

Step:    packed columns k … of w, and the columns k … and STORED + k … of x that they meet (ops/pack.py); then, of a weight in
         two precisions, columns of its other part.
Why:     a weight is read once, at half a byte an entry, and less is read from shared memory than for codes of 8 bits: 2 KB of w,
         not 4, beside 8 KB of x in two products of 64 x 128 x 32.
Order:   products read their registers while they run.  Two steps alternate, with registers of their own: one step's products run
         while the next one's codes are unpacked, and end before its registers are written again.
Hidden:  a program is one warpgroup, and two fit a multiprocessor: one multiplies while the other writes, or changes units.
Scale:   codes are 16 q (int4_codes.py); the epilogue, or the change of units, takes it back.
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import triton
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

from mmqc.kernels.int4_codes import int4_as_int8
from mmqc.kernels.mixed_matmul_tiles import finish_mixed_tile
from mmqc.kernels.pingpong_tiles import count_items, find_item, meet, write_tile
from mmqc.kernels.row_scale import row_scale_tile
from mmqc.kernels.scaled_matmul_tiles import finish_scaled_tile

FACTOR = gl.constexpr(0.0625)


@triton.jit
def change_units_tile(acc, x_scale_ptr, w_scale_ptr, rows, cols, M, N):
    """Acc [BM, BN], 16 times the low part's sums, in units of the high part, rounded (mixed_matmul_tiles.py)."""
    row_mask, col_mask = rows < M, cols < N
    f = tl.load(x_scale_ptr + rows * 2, mask=row_mask, other=0.0) * 0.0625
    high = tl.load(x_scale_ptr + rows * 2 + 1, mask=row_mask, other=1.0)
    f = f / tl.where(high > 0.0, high, 1.0)
    g = tl.load(w_scale_ptr + cols * 2, mask=col_mask, other=0.0)
    g = g / tl.load(w_scale_ptr + cols * 2 + 1, mask=col_mask, other=1.0)
    y = acc.to(tl.float32) * f[:, None] * g[None, :]
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [y], dtype=tl.int32, is_pure=True, pack=1)


@gluon.jit
def fill_slot(
    descs, ring, slot, item, step, last, row, col, sizes, TWO: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copy one step; (item, step, the one behind the item's last, first row, first column) of the next."""
    x_desc, w_desc, high_desc = descs[0], descs[1], descs[2]
    x_ring, w_ring, ready = ring[0], ring[1], ring[2].index(slot)
    M, N, STORED, LOW, low_steps, steps, rounds, rest, items = (
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8])  # fmt: skip
    if item < items:
        if not TWO or step < low_steps:
            k = step * BLOCK_K
            mbarrier.expect(ready, (2 * BLOCK_M + BLOCK_N) * BLOCK_K)
            tma.async_copy_global_to_shared(w_desc, [col, k], ready, w_ring.index(slot))
            tma.async_copy_global_to_shared(x_desc, [row, k], ready, x_ring.index(2 * slot))
            tma.async_copy_global_to_shared(x_desc, [row, STORED + k], ready, x_ring.index(2 * slot + 1))
        else:
            k = (step - low_steps) * BLOCK_K
            mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * BLOCK_K)
            tma.async_copy_global_to_shared(high_desc, [col, k], ready, w_ring.index(slot))
            tma.async_copy_global_to_shared(x_desc, [row, LOW + k], ready, x_ring.index(2 * slot))
        step += 1
        if step == last:
            item += 1
            row, col, step, last, _part, _inside = find_item(
                gl.minimum(item, items - 1), rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
            )
    return item, step, last, row, col


@gluon.jit
def bytes_as_codes(w):
    """Bytes as int8."""
    return w.to(gl.int8, bitcast=True)


@gluon.jit
def start_step(acc, ring, slot, phase, OPERAND: gl.constexpr, PACKED: gl.constexpr):
    """Start the products of a step: of both halves of its bytes, or of its bytes as codes."""
    x_ring, w_ring, full = ring[0], ring[1], ring[2]
    mbarrier.wait(full.index(slot), phase)
    w = w_ring.index(slot).load(OPERAND)
    if PACKED:
        low, high = int4_as_int8(w, True)
        acc = warpgroup_mma(low, x_ring.index(2 * slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(high, x_ring.index(2 * slot + 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(2, deps=(acc,))  # the step before has read its slot, and its registers
    else:
        acc = warpgroup_mma(bytes_as_codes(w), x_ring.index(2 * slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
    tl.debug_barrier()  # ... in all warps
    return acc


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The slot behind it, and its phase."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def slot_before(slot, STAGES: gl.constexpr):
    """The slot in front of it."""
    return gl.where(slot == 0, STAGES, slot) - 1


@gluon.jit
def multiply_steps(
    acc, count, slot, phase, item, step, last, row, col, descs, ring, sizes, OPERAND: gl.constexpr, PACKED: gl.constexpr,
    TWO: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the products of ``count`` steps, and fill the slots that they leave; what comes next, as ``fill_slot`` has it."""
    for _pair in range(count // 2):
        acc = start_step(acc, ring, slot, phase, OPERAND, PACKED)
        item, step, last, row, col = fill_slot(
            descs, ring, slot_before(slot, STAGES), item, step, last, row, col, sizes, TWO, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            PROGRAMS, PARTS,
        )  # fmt: skip
        slot, phase = next_slot(slot, phase, STAGES)
        acc = start_step(acc, ring, slot, phase, OPERAND, PACKED)
        item, step, last, row, col = fill_slot(
            descs, ring, slot_before(slot, STAGES), item, step, last, row, col, sizes, TWO, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            PROGRAMS, PARTS,
        )  # fmt: skip
        slot, phase = next_slot(slot, phase, STAGES)
    if count % 2 == 1:
        acc = start_step(acc, ring, slot, phase, OPERAND, PACKED)
        item, step, last, row, col = fill_slot(
            descs, ring, slot_before(slot, STAGES), item, step, last, row, col, sizes, TWO, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            PROGRAMS, PARTS,
        )  # fmt: skip
        slot, phase = next_slot(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, slot, phase, item, step, last, row, col


@gluon.jit
def make_slots(
    x_desc, w_desc, y_desc, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):
    """(x, w, full, y): slots with two tiles of x each, their barriers, a tile of results."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_ring = gl.allocate_shared_memory(y_desc.dtype, [1, BLOCK_M, BLOCK_N], y_desc.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gdc_wait()
    return x_ring, w_ring, full, y_ring


@gluon.jit
def packed_scaled_kernel(
    x_desc, w_desc, y_desc, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, residual_ptr, next_scale_ptr, next_row_ptr, low_x_ptr,
    low_w_ptr, part_ptr, counter_ptr, M, N, STORED, stride_r,
    KIND: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, NEXT: gl.constexpr,
    NEXT_KIND: gl.constexpr, ROUND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr,
    RANK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Y = epilogue(x wᵀ), everything as in scaled_pingpong_kernel, of packed w [N, STORED]."""
    ring = make_slots(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    of_z: gl.constexpr = gl.bfloat16 if ROUND == 1 else gl.float16 if ROUND == 2 else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    steps = gl.cdiv(STORED, BLOCK_K)
    descs = (x_desc, w_desc, w_desc)
    sizes = (M, N, STORED, STORED, steps, steps, rounds, rest, items)
    item = 0
    row, col, step, last, _part, _inside = find_item(
        item, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
    )
    for i in gl.static_range(STAGES - 1):
        item, step, last, row, col = fill_slot(
            descs,
            ring,
            i,
            item,
            step,
            last,
            row,
            col,
            sizes,
            False,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP_M,
            PROGRAMS,
            PARTS,
        )
    slot = 0
    phase = 0
    for own in range(items):
        tile_row, tile_col, begin, end, part, inside = find_item(
            own, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
        )
        acc = gl.zeros((BLOCK_N, BLOCK_M), gl.int32, layout)
        across: gl.constexpr = acc.permute((1, 0)).type.layout
        rows = tile_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, across))
        cols = tile_col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, across))
        s_x = row_scale_tile(x_scale_ptr, row_ptr, rows, rows < M, KIND)  # arrives under the products
        acc, slot, phase, item, step, last, row, col = multiply_steps(
            acc, end - begin, slot, phase, item, step, last, row, col, descs, ring, sizes, operand, True, False, BLOCK_M, BLOCK_N,
            BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES,
        )  # fmt: skip
        acc, mine = meet(acc, part_ptr, counter_ptr, own == rounds, inside, rest, part, PARTS, BLOCK_N, BLOCK_M, 4)
        if mine:
            y = finish_scaled_tile(acc.permute((1, 0)), s_x, w_scale_ptr, bias_ptr, residual_ptr, next_scale_ptr, next_row_ptr,
                                   low_x_ptr, low_w_ptr, rows, cols, M, N, stride_r, HAS_BIAS, HAS_RESIDUAL, FACTOR, ACTIVATION,
                                   NEXT, NEXT_KIND, of_z, LOW, HIGH, PTX, RANK)  # fmt: skip
            write_tile(y, y_desc, ring[3].index(0), tile_row, tile_col)
    tma.store_wait(0)


@gluon.jit
def packed_mixed_kernel(
    x_desc, w_desc, high_desc, y_desc, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, part_ptr, counter_ptr, M, N,
    STORED, LOW, HIGH, HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As mixed_pingpong_kernel, of packed w [N, STORED] of LOW columns and bytes w_high [N, HIGH]."""
    ring = make_slots(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    low_steps = gl.cdiv(STORED, BLOCK_K)
    steps = low_steps + gl.cdiv(HIGH, BLOCK_K)
    descs = (x_desc, w_desc, high_desc)
    sizes = (M, N, STORED, LOW, low_steps, steps, rounds, rest, items)
    item = 0
    row, col, step, last, _part, _inside = find_item(
        item, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
    )
    for i in gl.static_range(STAGES - 1):
        item, step, last, row, col = fill_slot(
            descs, ring, i, item, step, last, row, col, sizes, True, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS
        )
    slot = 0
    phase = 0
    for own in range(items):
        tile_row, tile_col, begin, end, part, inside = find_item(
            own, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
        )
        acc = gl.zeros((BLOCK_N, BLOCK_M), gl.int32, layout)
        across: gl.constexpr = acc.permute((1, 0)).type.layout
        rows = tile_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, across))
        cols = tile_col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, across))
        low = gl.maximum(gl.minimum(end, low_steps) - begin, 0)
        acc, slot, phase, item, step, last, row, col = multiply_steps(
            acc, low, slot, phase, item, step, last, row, col, descs, ring, sizes, operand, True, True, BLOCK_M, BLOCK_N, BLOCK_K,
            GROUP_M, PROGRAMS, PARTS, STAGES,
        )  # fmt: skip
        acc = change_units_tile(acc.permute((1, 0)), x_scale_ptr, w_scale_ptr, rows, cols, M, N)
        acc = gl.convert_layout(acc.permute((1, 0)), layout, assert_trivial=True)
        acc, slot, phase, item, step, last, row, col = multiply_steps(
            acc, end - begin - low, slot, phase, item, step, last, row, col, descs, ring, sizes, operand, False, True, BLOCK_M,
            BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES,
        )  # fmt: skip
        acc, mine = meet(acc, part_ptr, counter_ptr, own == rounds, inside, rest, part, PARTS, BLOCK_N, BLOCK_M, 4)
        if mine:
            y = finish_mixed_tile(acc.permute((1, 0)), x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, rows, cols,
                                  M, N, 2, HAS_BIAS)  # fmt: skip
            write_tile(y, y_desc, ring[3].index(0), tile_row, tile_col)
    tma.store_wait(0)
