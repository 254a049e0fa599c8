"""Kernels of packed_matmul.py: 4-bit weights that are unpacked in registers, the operand from which a warpgroup multiplies.

    every step   wait for its slot;  load w, unpack;  start its products into yᵀ;  copy what comes;  wait for the step before

Step:    packed columns k … of w, and the columns k … of both halves of x that they meet (ops/pack.py), each a tensor of its own,
         so that zeros stand behind it; then, of a weight in two precisions, columns of its other part.
Why:     a weight is read as it is stored, at half a byte an entry; and a product reads one operand from shared memory, not two.
Order:   products read their registers while they run.  Two steps alternate, with registers of their own: one step's products run
         while the next one's codes are unpacked, and end before its registers are written again.
Ahead:   a step fills the slot of the one before the last, which all warps have seen done, with what comes two steps less than
         there are slots later, in this item or in the next: an item has so many steps or more.  So no copy stands between two
         steps' products, and with few rows, whose steps are short, more slots are more bytes on their way.
Added:   of few rows, whose parts are many, a program's part of a tile that several share comes first, and is added up: what that
         takes is hidden while the rest of the machine reads on.  At the end there would be nothing left to read.
Linears: their tiles of columns lie one after the other, each linear's in whole ones; whoever copies or writes finds its own.
Hidden:  a program is one warpgroup, and two fit a multiprocessor: while one waits, unpacks or copies, the other multiplies.
Short:   with 2/3 of the instructions and few spills two parts took 79 us for 125 (ADR 17).
Scale:   codes are 16 q (int4_codes.py); the epilogue, or the change of units, takes it back.
Kept:    what a token or a column of the tile needs at its end is read at its start, by one thread each, and passed on at the end.
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

from mmqc.kernels.matmul.linears import count_tiles, find_linear, pick
from mmqc.kernels.matmul.scaled_matmul_tiles import finish_tile, scale_sums
from mmqc.kernels.shared.early_start import await_inputs
from mmqc.kernels.shared.gluon_names import async_load
from mmqc.kernels.shared.int4_codes import int4_as_int8
from mmqc.kernels.shared.row_scale import row_scale_tile
from mmqc.kernels.warpgroup.pingpong_tiles import add_up, count_items, find_item, meet, write_tile

FACTOR = gl.constexpr(0.0625)
BEHIND = gl.constexpr(2)  # slots that are not filled: of the products that run, and of those before them


@gluon.jit
def make_slots(
    x_desc, w_desc, y_desc, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SHARES: gl.constexpr,
    SLOTS: gl.constexpr, WEIGHTS: gl.constexpr = 1,
):
    """(x, w, full, y): slots with two tiles of x each and one of every weight, their barriers, a share of a tile of results."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * SLOTS, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [WEIGHTS * SLOTS, BLOCK_N, BLOCK_K], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    y_tile = gl.allocate_shared_memory(y_desc.dtype, [BLOCK_M // SHARES, BLOCK_N], y_desc.layout)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    return x_ring, w_ring, full, y_tile


@gluon.jit
def find_next(
    item, items, rounds, rest, steps, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr, PARTS: gl.constexpr, FIRST: gl.constexpr,
):
    """``find_item``, with FIRST a part in front of whole tiles, and whether it is one; behind the last item, one without steps."""
    at, shared = gl.minimum(item, items - 1), item == rounds
    if PARTS > 1 and FIRST:
        shared = (items > rounds) & (item == 0)
        at = gl.where(items > rounds, gl.where(item == 0, rounds, item - 1), at)
    row, col, first, last, part, inside = find_item(
        at, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
    )
    return row, col, first, gl.where(item < items, last, first), part, inside, shared


@gluon.jit
def find_ahead(inside, then, here, following):
    """(Row, column, step) of this item's step ``then`` or, if that is not ``inside`` it, of the next item's that comes there."""
    row, col = gl.where(inside, here[0], following[0]), gl.where(inside, here[1], following[1])
    return row, col, gl.where(inside, then, following[2] + then - here[3])


@gluon.jit
def prefetch_rows(rows, first, stored, LINES: gl.constexpr):
    """Ask for LINES lines of 128 bytes of each row, from byte ``first`` on."""
    for line in gl.static_range(LINES):
        at = rows + gl.minimum(first + 128 * line, stored - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64, bitcast=True)], dtype=tl.int32, is_pure=False,
            pack=1,
        )


@gluon.jit
def fill_slot(
    descs, ring, slot, row, col, step, low_steps, N, N1, TWO: gl.constexpr, LINEARS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):
    """Start to copy a step; ``col`` counts the columns of all linears, in whole tiles."""
    x_ring, w_ring, ready = ring[0], ring[1], ring[2].index(slot)
    if not TWO or step < low_steps:
        k = step * BLOCK_K
        which, own = find_linear(col // BLOCK_N, N, N1, BLOCK_N, LINEARS)
        mbarrier.expect(ready, (2 * BLOCK_M + BLOCK_N) * BLOCK_K)
        if which == 0:
            async_load(descs[2], [own * BLOCK_N, k], ready, w_ring.index(slot))
        elif which == 1:
            async_load(descs[3], [own * BLOCK_N, k], ready, w_ring.index(slot))
        else:
            async_load(descs[4], [own * BLOCK_N, k], ready, w_ring.index(slot))
        async_load(descs[0], [row, k], ready, x_ring.index(2 * slot))
        async_load(descs[1], [row, k], ready, x_ring.index(2 * slot + 1))
    else:
        k = (step - low_steps) * BLOCK_K
        mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * BLOCK_K)
        async_load(descs[3], [col, k], ready, w_ring.index(slot))
        async_load(descs[4], [row, k], ready, x_ring.index(2 * slot))


@gluon.jit
def bytes_as_codes(w):
    """Bytes as int8."""
    return w.to(gl.int8, bitcast=True)


@gluon.jit
def take_step(
    acc, step, slot, phase, here, following, low_steps, descs, ring, N, N1, PACKED: gl.constexpr, TWO: gl.constexpr,
    LINEARS: gl.constexpr, OPERAND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Start a step's products, of both halves of its bytes, or of its bytes as codes, and copy ahead; the next slot, its phase."""
    x_ring, w_ring, full = ring[0], ring[1], ring[2]
    mbarrier.wait(full.index(slot), phase)
    w = w_ring.index(slot).load(OPERAND)
    if PACKED:
        lower, upper = int4_as_int8(w, True)
        acc = warpgroup_mma(lower, x_ring.index(2 * slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(upper, x_ring.index(2 * slot + 1).permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(bytes_as_codes(w), x_ring.index(2 * slot).permute((1, 0)), acc, is_async=True)
    ahead: gl.constexpr = SLOTS - BEHIND
    then = step + ahead
    inside = then < here[3]
    if inside | (following[2] < following[3]):
        tl.debug_barrier()  # all warps have waited for the step before the last
        row, col, coming = find_ahead(inside, then, here, following)
        fill_slot(
            descs, ring, (slot + ahead) % SLOTS, row, col, coming, low_steps, N, N1, TWO, LINEARS, BLOCK_M, BLOCK_N, BLOCK_K
        )
    acc = warpgroup_mma_wait(2 if PACKED else 1, deps=(acc,))
    return acc, (slot + 1) % SLOTS, phase ^ ((slot + 1) // SLOTS)


@gluon.jit
def multiply_steps(
    acc, first, last, slot, phase, here, following, low_steps, descs, ring, N, N1, PACKED: gl.constexpr, TWO: gl.constexpr,
    LINEARS: gl.constexpr, OPERAND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Add the products of steps of item ``here``; as ``take_step``."""
    count = gl.maximum(last - first, 0)
    for pair in range(count // 2):
        for half in gl.static_range(2):  # each with registers of its own
            acc, slot, phase = take_step(
                acc, first + 2 * pair + half, slot, phase, here, following, low_steps, descs, ring, N, N1, PACKED, TWO, LINEARS,
                OPERAND, BLOCK_M, BLOCK_N, BLOCK_K, SLOTS,
            )
    if count % 2 == 1:
        acc, slot, phase = take_step(
            acc, last - 1, slot, phase, here, following, low_steps, descs, ring, N, N1, PACKED, TWO, LINEARS, OPERAND, BLOCK_M,
            BLOCK_N, BLOCK_K, SLOTS,
        )
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, slot, phase


@gluon.jit
def write_shares(y, y_desc, y_tile, row, col, SHARES: gl.constexpr):
    """yᵀ [BN, BM], in shares of its tokens."""
    if SHARES == 1:
        write_tile(y.permute((1, 0)), y_desc, y_tile, row, col)
    else:
        n: gl.constexpr = y.shape[0]
        m: gl.constexpr = y.shape[1] // 2
        front, back = gl.split(y.reshape((n, 2, m)).permute((0, 2, 1)))
        write_shares(front, y_desc, y_tile, row, col, SHARES // 2)
        write_shares(back, y_desc, y_tile, row + m, col, SHARES // 2)


@gluon.jit
def fetch_scales(
    x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, row, col, M, N, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """The scales of a tile's rows of x, and of its columns, and their biases, each in one thread."""
    each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows, cols = row + gl.arange(0, BLOCK_M, each), col + gl.arange(0, BLOCK_N, each)
    s_x = row_scale_tile(x_scale_ptr, row_ptr, rows, rows < M, KIND)
    s_w = gl.load(w_scale_ptr + cols, mask=cols < N, other=0.0)
    b = s_w
    if HAS_BIAS:
        b = gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
    return s_x, s_w, b


@gluon.jit
def keep_units(
    tokens, columns, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, row, col, M, N, HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """Of a tile's tokens: f / 16, s_xh, o_xl, o_xh; of its columns: g, s_wh, s_wl c_l, s_wh c_h, b (mixed_matmul_tiles.py)."""
    each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows, cols = row + gl.arange(0, BLOCK_M, each), col + gl.arange(0, BLOCK_N, each)
    row_mask, col_mask = rows < M, cols < N
    high = gl.load(x_scale_ptr + rows * 2 + 1, mask=row_mask, other=0.0)
    low = gl.load(x_scale_ptr + rows * 2, mask=row_mask, other=0.0) * FACTOR
    tokens.index(0).store(low / gl.where(high > 0.0, high, 1.0))
    tokens.index(1).store(high)
    for p in gl.static_range(2):
        tokens.index(2 + p).store(gl.load(x_offset_ptr + rows * 2 + p, mask=row_mask, other=0.0))
    low = gl.load(w_scale_ptr + cols * 2, mask=col_mask, other=0.0)
    high = gl.load(w_scale_ptr + cols * 2 + 1, mask=col_mask, other=1.0)
    columns.index(0).store(low / high)
    columns.index(1).store(high)
    columns.index(2).store(low * gl.load(w_sum_ptr + cols * 2, mask=col_mask, other=0).to(gl.float32))
    columns.index(3).store(high * gl.load(w_sum_ptr + cols * 2 + 1, mask=col_mask, other=0).to(gl.float32))
    if HAS_BIAS:
        columns.index(4).store(gl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(gl.float32))


@gluon.jit
def change_kept_units(acc, tokens, columns, LAYOUT: gl.constexpr):
    """Acc [BN, BM], 16 times the low part's sums, in units of the high part, rounded."""
    f = tokens.index(0).load(gl.SliceLayout(0, LAYOUT))
    g = columns.index(0).load(gl.SliceLayout(1, LAYOUT))
    y = acc.to(gl.float32) * f[None, :] * g[:, None]
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [y], dtype=tl.int32, is_pure=True, pack=1)


@gluon.jit
def finish_kept_tile(acc, tokens, columns, HAS_BIAS: gl.constexpr, LAYOUT: gl.constexpr):
    """Acc [BN, BM] in units of the high part -> yᵀ, float32."""
    s_x = tokens.index(1).load(gl.SliceLayout(0, LAYOUT))
    y = acc.to(gl.float32) * s_x[None, :] * columns.index(1).load(gl.SliceLayout(1, LAYOUT))[:, None]
    for p in gl.static_range(2):
        o = tokens.index(2 + p).load(gl.SliceLayout(0, LAYOUT))
        y += o[None, :] * columns.index(2 + p).load(gl.SliceLayout(1, LAYOUT))[:, None]
    if HAS_BIAS:
        y += columns.index(4).load(gl.SliceLayout(1, LAYOUT))[:, None]
    return y


@gluon.jit(do_not_specialize=["M"])
def packed_scaled_kernel(
    x_desc, upper_desc, w_desc, w1_desc, w2_desc, y_desc, y1_desc, y2_desc, w_ptr, w1_ptr, w2_ptr, x_scale_ptr, row_ptr,
    w_scale_ptr, w_scale1_ptr, w_scale2_ptr, bias_ptr, bias1_ptr, bias2_ptr, next_scale_ptr, next_row_ptr,
    low_x_ptr, low_w_ptr, part_ptr, counter_ptr, M, N, N1, N2, STORED, stride_w,
    LINEARS: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    NEXT: gl.constexpr, NEXT_KIND: gl.constexpr, ROUND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    PTX: gl.constexpr, RANK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, SHARES: gl.constexpr, SLOTS: gl.constexpr,
    LINES: gl.constexpr, ADDED: gl.constexpr,
):
    """Every linear's y = epilogue(x wᵀ), everything as in scaled_pingpong_kernel, of packed w [N, STORED]."""
    ring = make_slots(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, SHARES, SLOTS)
    of_z: gl.constexpr = gl.bfloat16 if ROUND == 1 else gl.float16 if ROUND == 2 else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    width = count_tiles(N, N1, N2, BLOCK_N, LINEARS) * BLOCK_N
    rounds, rest, items = count_items(M, width, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    steps = gl.maximum(gl.cdiv(STORED, BLOCK_K), SLOTS - BEHIND)
    descs = (x_desc, upper_desc, w_desc, w1_desc, w2_desc)
    here = find_next(0, items, rounds, rest, steps, M, width, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS, ADDED)
    if LINES:
        each: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
        which, own = find_linear(here[1] // BLOCK_N, N, N1, BLOCK_N, LINEARS)
        last = pick(which, N, N1, N2, LINEARS) - 1
        ahead = gl.minimum(own * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, each)), last)
        prefetch_rows(pick(which, w_ptr, w1_ptr, w2_ptr, LINEARS) + ahead.to(gl.int64) * stride_w, here[2] * BLOCK_K, STORED, LINES)
        await_inputs()
    else:
        gdc_wait()
    for i in range(SLOTS - BEHIND):
        fill_slot(descs, ring, i, here[0], here[1], here[2] + i, steps, N, N1, False, LINEARS, BLOCK_M, BLOCK_N, BLOCK_K)
    slot = 0
    phase = 0
    for item in range(items):
        following = find_next(item + 1, items, rounds, rest, steps, M, width, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS, ADDED)
        which, own = find_linear(here[1] // BLOCK_N, N, N1, BLOCK_N, LINEARS)
        scale_ptr = pick(which, w_scale_ptr, w_scale1_ptr, w_scale2_ptr, LINEARS)
        shift_ptr = pick(which, bias_ptr, bias1_ptr, bias2_ptr, LINEARS)
        columns_of_it = pick(which, N, N1, N2, LINEARS)
        s_x, s_w, b = fetch_scales(x_scale_ptr, row_ptr, scale_ptr, shift_ptr, here[0], own * BLOCK_N, M, columns_of_it, KIND,
                                   HAS_BIAS, BLOCK_M, BLOCK_N)  # arrive under the products
        acc = gl.zeros((BLOCK_N, BLOCK_M), gl.int32, layout)
        acc, slot, phase = multiply_steps(
            acc, here[2], here[3], slot, phase, here, following, steps, descs, ring, N, N1, True, False, LINEARS, operand, BLOCK_M,
            BLOCK_N, BLOCK_K, SLOTS,
        )
        if ADDED:
            acc, mine = add_up(acc, part_ptr, counter_ptr, here[6], here[5], PARTS, BLOCK_N, BLOCK_M, 4)
        else:
            acc, mine = meet(acc, part_ptr, counter_ptr, here[6], here[5], rest, here[4], PARTS, BLOCK_N, BLOCK_M, 4)
        if mine:
            across: gl.constexpr = acc.permute((1, 0)).type.layout
            rows = here[0] + gl.arange(0, BLOCK_M, gl.SliceLayout(1, across))
            cols = own * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, across))
            y = scale_sums(acc.permute((1, 0)), gl.convert_layout(s_x, gl.SliceLayout(1, across)),
                           gl.convert_layout(s_w, gl.SliceLayout(0, across)), FACTOR)
            if HAS_BIAS:
                y += gl.convert_layout(b, gl.SliceLayout(0, across))[None, :]
            y = finish_tile(y, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr, rows, cols, M, columns_of_it,
                            ACTIVATION, NEXT, NEXT_KIND, of_z, LOW, HIGH, PTX, RANK)
            if which == 0:
                write_shares(y.permute((1, 0)), y_desc, ring[3], here[0], own * BLOCK_N, SHARES)
            elif which == 1:
                write_shares(y.permute((1, 0)), y1_desc, ring[3], here[0], own * BLOCK_N, SHARES)
            else:
                write_shares(y.permute((1, 0)), y2_desc, ring[3], here[0], own * BLOCK_N, SHARES)
        here = following
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def packed_mixed_kernel(
    x_desc, upper_desc, high_x_desc, w_desc, high_desc, y_desc, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr,
    part_ptr, counter_ptr, M, N, STORED, HIGH, HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, SHARES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """As mixed_pingpong_kernel, of packed w [N, STORED] and bytes w_high [N, HIGH]."""
    ring = make_slots(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, SHARES, SLOTS)
    gdc_wait()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tokens = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], plain)
    columns = gl.allocate_shared_memory(gl.float32, [5, BLOCK_N], plain)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    low_steps = gl.cdiv(STORED, BLOCK_K)
    steps = gl.maximum(low_steps + gl.cdiv(HIGH, BLOCK_K), SLOTS - BEHIND)
    descs = (x_desc, upper_desc, w_desc, high_desc, high_x_desc)
    here = find_next(0, items, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS, False)
    for i in range(SLOTS - BEHIND):
        fill_slot(descs, ring, i, here[0], here[1], here[2] + i, low_steps, N, N, True, 1, BLOCK_M, BLOCK_N, BLOCK_K)
    slot = 0
    phase = 0
    for item in range(items):
        following = find_next(item + 1, items, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS, False)
        keep_units(tokens, columns, x_scale_ptr, x_offset_ptr, w_scale_ptr, w_sum_ptr, bias_ptr, here[0], here[1], M, N, HAS_BIAS,
                   BLOCK_M, BLOCK_N)
        acc = gl.zeros((BLOCK_N, BLOCK_M), gl.int32, layout)
        acc, slot, phase = multiply_steps(
            acc, here[2], gl.minimum(here[3], low_steps), slot, phase, here, following, low_steps, descs, ring, N, N, True, True,
            1, operand, BLOCK_M, BLOCK_N, BLOCK_K, SLOTS,
        )
        acc = change_kept_units(acc, tokens, columns, layout)
        acc, slot, phase = multiply_steps(
            acc, gl.maximum(here[2], low_steps), here[3], slot, phase, here, following, low_steps, descs, ring, N, N, False, True,
            1, operand, BLOCK_M, BLOCK_N, BLOCK_K, SLOTS,
        )
        acc, mine = meet(acc, part_ptr, counter_ptr, here[6], here[5], rest, here[4], PARTS, BLOCK_N, BLOCK_M, 4)
        if mine:
            y = finish_kept_tile(acc, tokens, columns, HAS_BIAS, layout)
            write_shares(y, y_desc, ring[3], here[0], here[1], SHARES)
        here = following
    tma.store_wait(0)
