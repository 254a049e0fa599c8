"""The kernel of mixed_matmul.py for many rows on Hopper: pingpong_tiles.py's ring and consumers, three turns to a tile.

    acc = sum over low k of x_l w_l,   acc <- round(acc f(m) g(n)),   acc += sum over high k of x_h w_h      mixed_matmul_tiles.py

    consumer 0   low 1     -     low 2   units    high   result   low 1  …         - : the other's, the tensor cores are busy
    consumer 1     -     (high)    -     low 1   units    low 2     -    …

Why:     by their instructions the change of units and the result each last a quarter of a tile's products, and the high part is
         an eighth of them, too short to hide either.  With the low part in halves, each stands under one of the other consumer's.
Turns:   the consumers alternate; the second's first turn has no steps, for it is behind by half a tile.  Copies come in this order.
Cut:     parts of K of a tile of the last round are added in units of the high part: each that holds low channels is rounded once.
Columns: float32 [4, N], g, s_wh, s_wl c_l and s_wh c_h side by side (unpack_weight.py): half the instructions, few spills.
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mmqc.kernels.warpgroup.pingpong_tiles import (
    count_items,
    fill_steps,
    find_item,
    make_ring,
    meet,
    multiply_ring,
    write_tile,
)


@triton.jit
def change_units_tile(acc, x_scale_ptr, column_ptr, rows, cols, M, N):
    """Acc [BM, BN] of the low part in units of the high part, rounded."""
    row_mask = rows < M
    low = tl.load(x_scale_ptr + rows * 2, mask=row_mask, other=0.0)
    high = tl.load(x_scale_ptr + rows * 2 + 1, mask=row_mask, other=1.0)
    f = low / tl.where(high > 0.0, high, 1.0)
    g = tl.load(column_ptr + cols, mask=cols < N, other=0.0)
    y = acc.to(tl.float32) * f[:, None] * g[None, :]
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def finish_columns_tile(
    acc, x_scale_ptr, x_offset_ptr, column_ptr, bias_ptr, rows, cols, M, N, HAS_BIAS: tl.constexpr
):
    """Acc [BM, BN] in units of the high part -> y, float32."""
    row_mask, col_mask = rows < M, cols < N
    s_x = tl.load(x_scale_ptr + rows * 2 + 1, mask=row_mask, other=0.0)
    y = acc.to(tl.float32) * s_x[:, None] * tl.load(column_ptr + N + cols, mask=col_mask, other=0.0)[None, :]
    for p in tl.static_range(2):
        o = tl.load(x_offset_ptr + rows * 2 + p, mask=row_mask, other=0.0)
        y += o[:, None] * tl.load(column_ptr + (2 + p) * N + cols, mask=col_mask, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    return y


@gluon.jit
def find_cut(rest, steps, PARTS: gl.constexpr):
    """(First step, the one behind the last) of this program's item of the last round."""
    first, last = steps * 0, steps
    if PARTS > 1:
        each = gl.cdiv(steps, PARTS)
        first = gl.program_id(0) // rest * each
        last = gl.minimum(first + each, steps)
    return first, last


@gluon.jit
def find_turn(item, segment, items, rounds, cut_first, cut_last, high, steps):
    """(First step, the one behind the last): of the low part's halves, segments 0 and 1, or of the high part; or none."""
    begin = gl.where(segment == 0, 0, gl.where(segment == 1, high // 2, high))
    end = gl.where(segment == 0, high // 2, gl.where(segment == 1, high, steps))
    begin = gl.maximum(begin, gl.where(item == rounds, cut_first, 0))
    end = gl.minimum(end, gl.where(item == rounds, cut_last, steps))
    here = (item >= 0) & (item < items)
    return begin, gl.where(here, gl.maximum(begin, end), begin)


@gluon.jit
def take_turn(
    acc,
    ring,
    seen,
    item,
    segment,
    items,
    rounds,
    cut_first,
    cut_last,
    high,
    steps,
    STAGES: gl.constexpr,
    which: gl.constexpr,
):
    """Multiply the steps of a turn, once the other consumer's turn before it has started all of its own.

    ``seen``: steps of the ring before that one.  (Sums, steps seen behind this one).
    """
    other = gl.where(segment == 2, item + 1, item - 1)
    begin, end = find_turn(other, (segment + 1) % 3, items, rounds, cut_first, cut_last, high, steps)
    first, last = find_turn(item, segment, items, rounds, cut_first, cut_last, high, steps)
    seen += end - begin
    if other < items:  # else it has come to its end, and what is left of the ring is all this one's
        mbarrier.wait(ring[5].index(which), ((3 * (item // 2) + segment) & 1) ^ 1)
    acc = multiply_ring(acc, ring, seen, last - first, 1 - which, STAGES)
    return acc, seen + last - first


@gluon.jit
def mixed_consumer(
    which: gl.constexpr, y_desc, ring, operands, M, N, START, END, HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):
    """One of the two warpgroups that multiply and write."""
    x_scale_ptr, x_offset_ptr, column_ptr, bias_ptr, part_ptr, counter_ptr = operands
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128 if BLOCK_N == 256 else BLOCK_N, 32])
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    steps, high = gl.cdiv(END, BLOCK_K), START // BLOCK_K
    cut_first, cut_last = find_cut(rest, steps, PARTS)
    seen = 0
    if which == 1:  # the turn without steps
        begin, seen = find_turn(0, 0, items, rounds, cut_first, cut_last, high, steps)
        seen -= begin
        mbarrier.wait(ring[5].index(1), 0)
        mbarrier.arrive(ring[5].index(0), count=1)
    for item in range(which, items, 2):
        row, col, _first, _last, part, inside = find_item(
            item, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
        )
        rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, layout)
        for half in range(2):
            acc, seen = take_turn(
                acc, ring, seen, item, half, items, rounds, cut_first, cut_last, high, steps, STAGES, which
            )
        acc = change_units_tile(acc, x_scale_ptr, column_ptr, rows, cols, M, N)
        acc, seen = take_turn(acc, ring, seen, item, 2, items, rounds, cut_first, cut_last, high, steps, STAGES, which)
        acc, mine = meet(acc, part_ptr, counter_ptr, item == rounds, inside, rest, part, PARTS, BLOCK_M, BLOCK_N, WARPS)
        if mine:
            y = finish_columns_tile(acc, x_scale_ptr, x_offset_ptr, column_ptr, bias_ptr, rows, cols, M, N, HAS_BIAS)
            write_tile(y, y_desc, ring[2].index(which), row, col)
    tma.store_wait(0)


@gluon.jit
def fill_turns(
    x_desc, w_desc, ring, M, N, LOW, START, END, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):
    """The warp that copies.  Behind its low channels x runs on into its high ones, where w has zeros up to START."""
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    steps, high = gl.cdiv(END, BLOCK_K), START // BLOCK_K
    cut_first, cut_last = find_cut(rest, steps, PARTS)
    slot = 0
    phase = 1
    for turn in range(2 + 6 * ((items + 1) // 2)):
        own = gl.maximum(turn // 2 - turn % 2, 0)  # of its consumer's turns that have steps
        item = gl.where(turn == 1, items, 2 * (own // 3) + turn % 2)
        first, last = find_turn(item, own % 3, items, rounds, cut_first, cut_last, high, steps)
        row, col, _first, _last, _part, _inside = find_item(
            gl.minimum(item, items - 1), rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
        )
        slot, phase = fill_steps(x_desc, w_desc, ring, row, col, first, last, slot, phase, START, START - LOW, BLOCK_M, BLOCK_N,
                                 BLOCK_K, STAGES)


@gluon.jit(do_not_specialize=["M"])
def mixed_pingpong_kernel(
    x_desc, w_desc, y_desc, x_scale_ptr, x_offset_ptr, column_ptr, bias_ptr, part_ptr, counter_ptr, M, N, LOW, START, END,
    HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """As joined_matmul_kernel of two parts."""
    ring = make_ring(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_N, STAGES, CONSUMERS)
    operands = (x_scale_ptr, x_offset_ptr, column_ptr, bias_ptr, part_ptr, counter_ptr)
    gl.warp_specialize([
        (mixed_consumer, (
            0, y_desc, ring, operands, M, N, START, END, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES,
            WARPS)),
        (mixed_consumer, (
            1, y_desc, ring, operands, M, N, START, END, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES,
            WARPS)),
        (fill_turns, (
            x_desc, w_desc, ring, M, N, LOW, START, END, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES)),
    ], [WARPS, 1], [REGISTERS, 24])
