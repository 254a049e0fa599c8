"""Kernel of hadamard_wgmma.py: a ring of tiles of x in shared memory, one warp that fills it, two warpgroups that transform them.

    fill       for every row of x:  wait until a slot is empty,  copy the row as X [A1 + A2, 128] into it by TMA
    transform  in blocks of 64 rows of A:  T = A X,  Y = T (H2 ⊗ H)ᵀ = [(T0 + T1) Hᵀ, (T0 - T1) Hᵀ],  codes,  TMA to memory

Halves:  T0 and T1 are the left and the right half of T, and in the same registers of the same thread; their sum and their
         difference are rounded and become operands where they are.  Half as many products as T (H2 ⊗ H)ᵀ, and H is a quarter of it.
Order:   the next block's A X runs while a block is written, and the other consumer's products run beside both.
Ends:    where a scale comes from a row's entries, its blocks are computed twice: first for the ends, then for the codes.
Ring:    slots by turns, so a consumer meets all of them; barriers by turns and consumers, so none sees the other's phase.
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

from mmqc.kernels.hadamard.hadamard_tiles import ASYMMETRIC, FLOAT, STATIC, asymmetric_tile, rounded_tile
from mmqc.kernels.shared.gluon_names import async_load, async_store, reinterpret
from mmqc.kernels.shared.quantize_codes import NEAR, clamped_byte
from mmqc.kernels.shared.row_scale import row_scale_tile

BLOCK = gl.constexpr(64)  # rows of A that a warpgroup multiplies
BYTES = gl.constexpr(2)  # an entry of x and of the matrices
CONSUMERS = gl.constexpr(2)
FP8 = gl.constexpr(gl.float8e4nv)


@gluon.jit
def fill_slots(
    x_desc, rest_desc, ring, M, A1: gl.constexpr, A2: gl.constexpr, COLUMNS: gl.constexpr,
    SLOTS: gl.constexpr, PROGRAMS: gl.constexpr,
):
    """The warp that copies."""
    tiles, rests, full, empty = ring[0], ring[1], ring[2], ring[3]
    for turn in range(gl.cdiv(M - gl.program_id(0), PROGRAMS)):
        row = gl.program_id(0) + turn * PROGRAMS
        slot = turn % SLOTS
        ready = full.index(turn % (SLOTS * CONSUMERS))
        mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        mbarrier.expect(ready, (A1 + A2) * COLUMNS * BYTES)
        async_load(x_desc, [row, 0, 0], ready, tiles.index(slot))
        if A2 > 0:
            async_load(rest_desc, [row, A1, 0], ready, rests.index(slot))


@gluon.jit
def outer_product(block: gl.constexpr, outer, x, A2: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start T = A X of a block of rows of A."""
    t = gl.zeros((BLOCK, COLUMNS), gl.float32, LAYOUT)
    t = warpgroup_mma(outer[0].index(block), x[0], t, use_acc=False, is_async=True)
    if A2 > 0:
        t = warpgroup_mma(outer[1].index(block), x[1], t, is_async=True)
    return t


@gluon.jit
def inner_products(t, inner, COLUMNS: gl.constexpr):
    """Start both halves of Y."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    left, right = t.reshape((BLOCK, 2, COLUMNS // 2)).permute((0, 2, 1)).split()
    plus = gl.convert_layout((left + right).to(inner.dtype), operand, assert_trivial=True)
    minus = gl.convert_layout((left - right).to(inner.dtype), operand, assert_trivial=True)
    zeros = gl.zeros((BLOCK, COLUMNS // 2), gl.float32, layout)
    inner_t = inner.permute((1, 0))
    left = warpgroup_mma(plus, inner_t, zeros, use_acc=False, is_async=True)
    right = warpgroup_mma(minus, inner_t, zeros, use_acc=False, is_async=True)
    return left, right


@gluon.jit
def joined(left, right, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Y of a block from its halves; nothing moves."""
    y = gl.join(left, right).permute((0, 2, 1)).reshape((BLOCK, COLUMNS))
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon.jit
def widen_ends(y, low, high, block: gl.constexpr, a):
    """The smallest and the largest sum of every row of a block and of those before; rows behind A's are zeros."""
    inside = block * BLOCK + gl.arange(0, BLOCK, low.type.layout) < a
    low = gl.minimum(low, gl.where(inside, gl.min(y, 1), float("inf")))
    high = gl.maximum(high, gl.where(inside, gl.max(y, 1), float("-inf")))
    return low, high


@gluon.jit
def find_scale(low, high, scale_at, offset_at, X_DTYPE: gl.constexpr, SCALE: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr):
    """A token's smallest entry and its scale; that and its offset go to memory.

    Entries are rounded; their ends are the rounded ends of the sums, for rounding keeps order.
    """
    smallest, largest = gl.min(low, 0) * SCALE, gl.max(high, 0) * SCALE
    smallest, largest = smallest.to(X_DTYPE).to(gl.float32), largest.to(X_DTYPE).to(gl.float32)
    s = tl.div_rn(largest - smallest, HIGH - LOW)
    gl.store(offset_at, smallest - s * LOW)
    gl.store(scale_at, s)
    return smallest, s


@gluon.jit
def codes_of(
    y, k, low, DTYPE: gl.constexpr, MODE: gl.constexpr, SCALE: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    X_DTYPE: gl.constexpr, PTX: gl.constexpr,
):
    """What is written of sums y, as hadamard_tiles.py has it: k is the factor, or the scale of asymmetric codes."""
    layout: gl.constexpr = y.type.layout
    if MODE == FLOAT:
        codes = (y * k).to(DTYPE)
    elif MODE == ASYMMETRIC:
        each: gl.constexpr = gl.SliceLayout(1, layout)
        low, k = gl.full((BLOCK,), low, gl.float32, each), gl.full((BLOCK,), k, gl.float32, each)
        codes = asymmetric_tile(rounded_tile(y, SCALE, X_DTYPE, PTX), low[:, None], k[:, None], LOW)
    elif FP8 == DTYPE:
        codes = gl.minimum(gl.maximum(y * k, -448.0), 448.0).to(DTYPE)
    else:
        factor = gl.full(y.shape, k, gl.float32, layout)
        near = gl.fma(y, factor, gl.full(y.shape, NEAR, gl.float32, layout))
        codes = clamped_byte(near, LOW, HIGH)
    return codes


@gluon.jit
def write_block(
    y, k, low, y_desc, place, row, block: gl.constexpr, COLUMNS: gl.constexpr, PLACES: gl.constexpr, MODE: gl.constexpr,
    SCALE: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, X_DTYPE: gl.constexpr, PTX: gl.constexpr,
):
    """Through shared memory; what lies behind A's rows is dropped."""
    tma.store_wait(PLACES - 1)
    tl.debug_barrier()  # the place is free
    place.store(codes_of(y, k, low, y_desc.dtype, MODE, SCALE, LOW, HIGH, X_DTYPE, PTX))
    fence_async_shared()
    box = reinterpret(place, y_desc.dtype, [1, BLOCK, COLUMNS], y_desc.layout)
    async_store(y_desc, [row, block * BLOCK, 0], box)


@gluon.jit
def take_row(
    write, y_desc, outer, inner, x, places, own: gl.constexpr, count, gone, row, low, high, least, k, a, SCALE: gl.constexpr,
    A1: gl.constexpr, A2: gl.constexpr, COLUMNS: gl.constexpr, PLACES: gl.constexpr, MODE: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr,
):
    """Write all blocks of a row, the ``count``-th of its consumer, and say that its slot is ``gone``; or else find its ends."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    blocks: gl.constexpr = (A1 + A2 + BLOCK - 1) // BLOCK
    started: gl.constexpr = 2 if A2 > 0 else 1  # products of a block of T
    early: gl.constexpr = MODE <= STATIC  # else ptxas has too few registers for three blocks (C7512)
    t = warpgroup_mma_wait(0, deps=(outer_product(0, outer, x, A2, COLUMNS, layout),))
    for block in gl.static_range(blocks):
        left, right = inner_products(t, inner, COLUMNS)
        if block + 1 < blocks and early:
            t = outer_product(block + 1, outer, x, A2, COLUMNS, layout)
        left, right = warpgroup_mma_wait(started if block + 1 < blocks and early else 0, deps=(left, right))
        y = joined(left, right, COLUMNS, layout)
        if write:
            if block + 1 == blocks:
                tl.debug_barrier()  # all warps have read x
                mbarrier.arrive(gone, count=1)
            place = places.index(own + (count * blocks + block) % PLACES)
            write_block(
                y, k, least, y_desc, place, row, block, COLUMNS, PLACES, MODE, SCALE, LOW, HIGH, inner.dtype, PTX
            )
        else:
            low, high = widen_ends(y, low, high, block, a)
        if block + 1 < blocks:
            if not early:
                t = outer_product(block + 1, outer, x, A2, COLUMNS, layout)
            t = warpgroup_mma_wait(0, deps=(t,))
    return low, high


@gluon.jit
def transform_slots(
    which: gl.constexpr, y_desc, outer, inner, ring, places, ready, scale_ptr, row_ptr, token_ptr, offset_ptr, M, a,
    SCALE: gl.constexpr, A1: gl.constexpr, A2: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr,
    PLACES: gl.constexpr, PROGRAMS: gl.constexpr, MODE: gl.constexpr, KIND: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr,
):
    """A warpgroup that transforms every second row of its program."""
    each: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    tiles, rests, full, empty = ring[0], ring[1], ring[2], ring[3]
    turn = which
    mbarrier.wait(ready, 0)
    for row in range(gl.program_id(0) + which * PROGRAMS, M, CONSUMERS * PROGRAMS):
        slot, count = turn % SLOTS, turn // CONSUMERS
        gone = empty.index(slot)
        x = (tiles.index(slot).reshape([A1, COLUMNS]), rests.index(slot).reshape([A2 if A2 > 0 else A1, COLUMNS]))
        low, high = (
            gl.full((BLOCK,), float("inf"), gl.float32, each),
            gl.full((BLOCK,), float("-inf"), gl.float32, each),
        )
        least, k = row * 0.0, SCALE + row * 0.0
        if MODE == STATIC:
            rows = row + gl.full((BLOCK,), 0, gl.int32, each)
            k = tl.div_rn(k, gl.max(row_scale_tile(scale_ptr, row_ptr, rows, rows < M, KIND), 0))
        mbarrier.wait(full.index(turn % (SLOTS * CONSUMERS)), (turn // (SLOTS * CONSUMERS)) & 1)
        if MODE <= STATIC:  # scales that are known, or none
            take_row(True, y_desc, outer, inner, x, places, which * PLACES, count, gone, row, low, high, least, k, a, SCALE, A1, A2,
                     COLUMNS, PLACES, MODE, LOW, HIGH, PTX)
        else:
            for again in range(2):
                low, high = take_row(again == 1, y_desc, outer, inner, x, places, which * PLACES, count, gone, row, low, high,
                                     least, k, a, SCALE, A1, A2, COLUMNS, PLACES, MODE, LOW, HIGH, PTX)
                if again == 0:
                    least, k = find_scale(low, high, token_ptr + row, offset_ptr + row, inner.dtype, SCALE, LOW, HIGH)
        turn += CONSUMERS
    tma.store_wait(0)


@gluon.jit
def make_ring(x_desc, rest_desc, A1: gl.constexpr, A2: gl.constexpr, COLUMNS: gl.constexpr,
              SLOTS: gl.constexpr):
    """(Tiles of x, what of them is behind A1, full, empty)."""
    tiles = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, 1, A1, COLUMNS], x_desc.layout)
    rests = tiles
    if A2 > 0:
        rests = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, 1, A2, COLUMNS], rest_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS * CONSUMERS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(empty.index(i), count=1)
    return tiles, rests, full, empty


@gluon.jit
def load_matrices(outer_desc, outer_rest_desc, inner_desc, ready, BLOCKS: gl.constexpr, A1: gl.constexpr, A2: gl.constexpr,
                  COLUMNS: gl.constexpr):
    """Start to copy A, in blocks of rows, and H; ((blocks of A up to column A1, behind it), H)."""
    inner = gl.allocate_shared_memory(inner_desc.dtype, [COLUMNS // 2, COLUMNS // 2], inner_desc.layout)
    outer = gl.allocate_shared_memory(outer_desc.dtype, [BLOCKS, BLOCK, A1], outer_desc.layout)
    rest = outer
    if A2 > 0:
        rest = gl.allocate_shared_memory(outer_desc.dtype, [BLOCKS, BLOCK, A2], outer_rest_desc.layout)
    mbarrier.expect(ready, (BLOCKS * BLOCK * (A1 + A2) + COLUMNS * COLUMNS // 4) * BYTES)
    async_load(inner_desc, [0, 0], ready, inner)
    for i in gl.static_range(BLOCKS):
        async_load(outer_desc, [i * BLOCK, 0], ready, outer.index(i))
        if A2 > 0:
            async_load(outer_rest_desc, [i * BLOCK, A1], ready, rest.index(i))
    return outer, rest, inner


@gluon.jit
def hadamard_wgmma_kernel(
    x_desc, rest_desc, y_desc, outer_desc, outer_rest_desc, inner_desc, scale_ptr, row_ptr, token_ptr, offset_ptr, M, a,
    SCALE: gl.constexpr, A1: gl.constexpr, A2: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr,
    PLACES: gl.constexpr, PROGRAMS: gl.constexpr, REGISTERS: gl.constexpr, MODE: gl.constexpr,
    KIND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr,
):
    """As hadamard_quantize_kernel."""
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(ready, count=1)
    ring = make_ring(x_desc, rest_desc, A1, A2, COLUMNS, SLOTS)
    fence_async_shared()
    outer_main, outer_rest, inner = load_matrices(
        outer_desc, outer_rest_desc, inner_desc, ready, (A1 + A2 + BLOCK - 1) // BLOCK, A1, A2, COLUMNS
    )
    outer = (outer_main, outer_rest)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, COLUMNS], y_desc.dtype)
    places = gl.allocate_shared_memory(y_desc.dtype, [CONSUMERS * PLACES, BLOCK, COLUMNS], flat)
    gdc_wait()  # what stands above overlaps the end of the kernel before, if the launch allows it
    gl.warp_specialize([
        (transform_slots, (
            0, y_desc, outer, inner, ring, places, ready, scale_ptr, row_ptr, token_ptr, offset_ptr, M, a, SCALE, A1, A2, COLUMNS,
            SLOTS, PLACES, PROGRAMS, MODE, KIND, LOW, HIGH, PTX)),
        (transform_slots, (
            1, y_desc, outer, inner, ring, places, ready, scale_ptr, row_ptr, token_ptr, offset_ptr, M, a, SCALE, A1, A2, COLUMNS,
            SLOTS, PLACES, PROGRAMS, MODE, KIND, LOW, HIGH, PTX)),
        (fill_slots, (x_desc, rest_desc, ring, M, A1, A2, COLUMNS, SLOTS, PROGRAMS)),
    ], [4, 1], [REGISTERS, 24])
