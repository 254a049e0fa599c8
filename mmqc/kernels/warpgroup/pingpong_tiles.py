"""Kernels of pingpong_matmul.py: a ring of operand tiles in shared memory, one warp that fills it, warpgroups that empty it.

    fill       for every item, for every step of K:  wait until the slot is empty,  copy x and w into it by TMA
    multiply   for every step:  wait until the slot is full,  start its products,  give back the slot of the step before
    write      epilogue in registers, tile into shared memory, TMA to memory

Two consumers of four warps take turns: while one writes its tile, the other's products keep the tensor cores busy.  One
consumer of eight warps has a tile of twice the size, which moves fewer bytes a product and leaves the tensor cores idle when
it writes.

Items:   a program walks over whole tiles, as many rounds as are complete.  The tiles of the last round, fewer than programs,
         are cut along K into PARTS, one a program.
Why:     Triton waits for every int32 product before it starts the next (scaled_matmul_tiles.py); here they queue up.
Ring:    consumers use slots in the order they are filled, so a consumer may not wait for a slot before the other has seen all
         of its own: a barrier tells one phase from the next, not from the next but one.  ``turn`` says when.
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
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

from mmqc.kernels.matmul.scaled_matmul_tiles import finish_scaled_tile
from mmqc.kernels.shared.gluon_names import async_load, async_store
from mmqc.kernels.shared.program_order import grouped_tile
from mmqc.kernels.shared.row_scale import row_scale_tile


@gluon.jit
def count_items(M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr):
    """(Complete rounds, tiles of the last one, items of this program)."""
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    rounds = tiles // PROGRAMS
    rest = tiles - rounds * PROGRAMS
    return rounds, rest, rounds + (gl.program_id(0) < rest * PARTS).to(gl.int32)


@gluon.jit
def find_item(
    item, rounds, rest, steps, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr, PARTS: gl.constexpr,
):
    """(First row, first column, first step of K, the one behind the last, part, tile of the last round)."""
    program = gl.program_id(0)
    tile, part, inside = item * PROGRAMS + program, program * 0, program
    first, last = program * 0, steps
    if PARTS > 1:  # noqa: SIM102  known when it is compiled
        if item == rounds:
            part = program // rest
            inside = program - part * rest
            tile = rounds * PROGRAMS + inside
            each = gl.cdiv(steps, PARTS)
            first = part * each
            last = gl.minimum(first + each, steps)
    tile_m, tile_n = grouped_tile(tile, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), GROUP_M)
    return tile_m * BLOCK_M, tile_n * BLOCK_N, first, last, part, inside


@gluon.jit
def fill_steps(
    x_desc, w_desc, ring, row, col, first, last, slot, phase, START, GAP, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Copy steps of one tile; from column START of w on, x's columns are GAP less.  (Next slot, its phase)."""
    SIZE: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K
    x_ring, w_ring, full, empty = ring[0], ring[1], ring[3], ring[4]
    for step in range(first, last):
        k = step * BLOCK_K
        ready = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(ready, SIZE)
        async_load(x_desc, [row, gl.where(k < START, k, k - GAP)], ready, x_ring.index(slot))
        async_load(w_desc, [col, k], ready, w_ring.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return slot, phase


@gluon.jit
def fill_ring(
    x_desc, w_desc, ring, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):
    """The warp that copies."""
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    slot = 0
    phase = 1
    for item in range(items):
        row, col, first, last, _part, _inside = find_item(
            item, rounds, rest, gl.cdiv(K, BLOCK_K), M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS
        )
        slot, phase = fill_steps(
            x_desc, w_desc, ring, row, col, first, last, slot, phase, K, 0, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
        )


@gluon.jit
def multiply_ring(acc, ring, seen, steps, NEXT: gl.constexpr, STAGES: gl.constexpr):
    """Add the products of so many steps, behind ``seen`` of the ring; as the last one starts, consumer NEXT, if any, may go on."""
    x_ring, w_ring, full, empty, turn = ring[0], ring[1], ring[3], ring[4], ring[5]
    slot, phase = seen % STAGES, (seen // STAGES) & 1
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        acc = warpgroup_mma(x_ring.index(slot), w_ring.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before has read its slot
        mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES, slot) - 1), count=1, pred=step > 0)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    if NEXT >= 0:
        mbarrier.arrive(turn.index(NEXT), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES, slot) - 1), count=1, pred=steps > 0)
    return acc


@gluon.jit
def sum_item(
    acc, ring, which: gl.constexpr, item, place, rounds, rest, steps, part_ptr, counter_ptr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, CONSUMERS: gl.constexpr,
):
    """(The sums of the item at ``place``, which ``find_item`` gave, in this consumer's turn; whether they are whole)."""
    other: gl.constexpr = 1 - which if CONSUMERS == 2 else -1
    if CONSUMERS == 2:
        mbarrier.wait(ring[5].index(which), ((item // 2) & 1) ^ (1 - which))
    _row, _col, first, last, part, inside = place
    acc = multiply_ring(acc, ring, item * steps, last - first, other, STAGES)  # items before this one are whole
    return meet(acc, part_ptr, counter_ptr, item == rounds, inside, rest, part, PARTS, BLOCK_M, BLOCK_N, WARPS)


@gluon.jit
def scaled_consumer(
    which: gl.constexpr, y_desc, ring, operands, M, N, K,
    KIND: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, NEXT: gl.constexpr, NEXT_KIND: gl.constexpr,
    ROUND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr, RANK: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, CONSUMERS: gl.constexpr,
):
    """A warpgroup, or two, that multiplies and writes."""
    (x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr, part_ptr,
     counter_ptr) = operands
    integer: gl.constexpr = ring[0].dtype == gl.int8
    of_z: gl.constexpr = gl.bfloat16 if ROUND == 1 else gl.float16 if ROUND == 2 else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, 128 if BLOCK_N == 256 and integer else BLOCK_N, 32]
    )
    rounds, rest, items = count_items(M, N, BLOCK_M, BLOCK_N, PROGRAMS, PARTS)
    steps = gl.cdiv(K, BLOCK_K)
    for item in range(which, items, CONSUMERS):
        place = find_item(item, rounds, rest, steps, M, N, BLOCK_M, BLOCK_N, GROUP_M, PROGRAMS, PARTS)
        rows = place[0] + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        cols = place[1] + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        s_x = row_scale_tile(x_scale_ptr, row_ptr, rows, rows < M, KIND)  # arrives under the products
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.int32 if integer else gl.float32, layout)
        acc, mine = sum_item(acc, ring, which, item, place, rounds, rest, steps, part_ptr, counter_ptr, BLOCK_M, BLOCK_N,
                             PARTS, STAGES, WARPS, CONSUMERS)
        if mine:
            y = finish_scaled_tile(acc, s_x, w_scale_ptr, bias_ptr, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr,
                                   rows, cols, M, N, HAS_BIAS, 1.0, ACTIVATION, NEXT, NEXT_KIND, of_z, LOW, HIGH, PTX, RANK)
            write_tile(y, y_desc, ring[2].index(which), place[0], place[1])
    tma.store_wait(0)


@gluon.jit
def by_thread(acc, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """Sums [BM, BN] of a warpgroup as [.., 128 WARPS]: what four registers of all threads hold is a row.  Nothing moves."""
    #   rows: rounds of warps, warps, 2 halves, 8 of lanes    columns: rounds, 2 halves, 4 of lanes, 2
    bits = acc.reshape((BLOCK_M // (16 * WARPS), WARPS, 2, 8, BLOCK_N // 16, 2, 4, 2))
    flat = bits.permute((0, 2, 4, 1, 3, 6, 5, 7)).reshape((BLOCK_M * BLOCK_N // (128 * WARPS), 128 * WARPS))
    return gl.convert_layout(flat, gl.BlockedLayout([1, 4], [1, 32], [1, WARPS], [1, 0]))


@gluon.jit
def from_thread(flat, like, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """The inverse, laid out as ``like``."""
    bits = flat.reshape((BLOCK_M // (16 * WARPS), 2, BLOCK_N // 16, WARPS, 8, 4, 2, 2)).permute(
        (0, 3, 1, 4, 2, 6, 5, 7)
    )
    return gl.convert_layout(bits.reshape((BLOCK_M, BLOCK_N)), like.type.layout)


@gluon.jit
def places(flat):
    """The rows and the columns of what ``by_thread`` gives, [.., 1] and [1, 128 WARPS]."""
    layout: gl.constexpr = flat.type.layout
    rows = gl.arange(0, flat.shape[0], gl.SliceLayout(1, layout))
    return rows[:, None], gl.arange(0, flat.shape[1], gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def meet(
    acc, part_ptr, counter_ptr, is_part, inside, rest, part, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):
    """(Sums, whether they are whole): the last part of a tile waits for the others, and adds them in order.

    Its program starts after those of the others, which wait for nobody.  The tile's counter is zero before and after.
    """
    mine = part >= 0
    if PARTS > 1:  # noqa: SIM102  known when it is compiled
        if is_part:
            flat = by_thread(acc, BLOCK_M, BLOCK_N, WARPS)
            line, column = places(flat)
            at = line * (128 * WARPS) + column
            counter_ptr += inside
            mine = part == PARTS - 1
            if mine:
                done = gl.atomic_add(counter_ptr, 0, sem="acquire")
                while done < PARTS - 1:
                    done = gl.atomic_add(counter_ptr, 0, sem="acquire")
                for p in gl.static_range(PARTS - 1):
                    flat += gl.load(part_ptr + (p * rest + inside) * (BLOCK_M * BLOCK_N) + at, cache_modifier=".cg")
                gl.store(counter_ptr, 0)
            else:
                gl.store(part_ptr + (part * rest + inside) * (BLOCK_M * BLOCK_N) + at, flat, cache_modifier=".cg")
                tl.debug_barrier()  # all threads' stores come before the one releasing atomic
                gl.atomic_add(counter_ptr, 1, sem="release")
            acc = from_thread(flat, acc, BLOCK_M, BLOCK_N, WARPS)
    return acc, mine


@gluon.jit
def places_of_sums(sum_ptr, flat, WARPS: gl.constexpr):
    """Where what ``by_thread`` gives is added up: a thread has four that follow each other, and neighbours' stand side by side."""
    line, column = places(flat)
    return sum_ptr + line * (128 * WARPS) + column % 4 * (32 * WARPS) + column // 4


@gluon.jit
def is_last(counter_ptr, PARTS: gl.constexpr):
    """Whether all other parts have been added."""
    tl.debug_barrier()  # all threads' come before the one that counts
    return gl.atomic_add(counter_ptr, 1, sem="acq_rel") == PARTS - 1


@gluon.jit
def take_sums(at):
    """The sums of all parts; zeros are left."""
    flat = gl.load(at, cache_modifier=".cg")
    gl.store(at, gl.zeros_like(flat))
    return flat


@gluon.jit
def add_up(
    acc, sum_ptr, counter_ptr, is_part, inside, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):
    """As ``meet``, of integers: every part is added to the tile's sums in memory, and the last one takes them; nobody waits.

    The sums, and the tile's counter, are zero before and after.
    """
    mine = inside >= 0
    if PARTS > 1:  # noqa: SIM102  known when it is compiled
        if is_part:
            flat = by_thread(acc, BLOCK_M, BLOCK_N, WARPS)
            at = places_of_sums(sum_ptr + inside * (BLOCK_M * BLOCK_N), flat, WARPS)
            gl.atomic_add(at, flat, sem="relaxed")
            mine = is_last(counter_ptr + inside, PARTS)
            if mine:
                flat = take_sums(at)
                gl.store(counter_ptr + inside, 0)
            acc = from_thread(flat, acc, BLOCK_M, BLOCK_N, WARPS)
    return acc, mine


@gluon.jit
def write_tile(y, y_desc, y_tile, row, col):
    """Through shared memory, where the tile before has left it; what lies outside y is dropped."""
    tma.store_wait(0)
    y_tile.store(y.to(y_desc.dtype))
    fence_async_shared()
    async_store(y_desc, [row, col], y_tile)


@gluon.jit
def make_ring(
    x_desc, w_desc, y_desc, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):
    """(x, w, y, full, empty, turn): slots of operands, tiles of results, of COLUMNS, and barriers."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    y_ring = gl.allocate_shared_memory(y_desc.dtype, [CONSUMERS, BLOCK_M, COLUMNS], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    gdc_wait()  # what stands above overlaps the end of the kernel before, if the launch allows it
    return x_ring, w_ring, y_ring, full, empty, turn


@gluon.jit(do_not_specialize=["M"])
def scaled_pingpong_kernel(
    x_desc, w_desc, y_desc, x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr, next_row_ptr, low_x_ptr,
    low_w_ptr, part_ptr, counter_ptr, M, N, K,
    KIND: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, NEXT: gl.constexpr,
    NEXT_KIND: gl.constexpr, ROUND: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PTX: gl.constexpr,
    RANK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Y = epilogue(x wᵀ), everything as in scaled_matmul_descriptor_kernel."""
    ring = make_ring(x_desc, w_desc, y_desc, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_N, STAGES, CONSUMERS)
    operands = (x_scale_ptr, row_ptr, w_scale_ptr, bias_ptr, next_scale_ptr, next_row_ptr, low_x_ptr, low_w_ptr,
                part_ptr, counter_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (scaled_consumer, (
                0, y_desc, ring, operands, M, N, K, KIND, HAS_BIAS, ACTIVATION, NEXT, NEXT_KIND, ROUND,
                LOW, HIGH, PTX, RANK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES, WARPS, CONSUMERS)),
            (scaled_consumer, (
                1, y_desc, ring, operands, M, N, K, KIND, HAS_BIAS, ACTIVATION, NEXT, NEXT_KIND, ROUND,
                LOW, HIGH, PTX, RANK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES, WARPS, CONSUMERS)),
            (fill_ring, (
                x_desc, w_desc, ring, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES)),
        ], [WARPS, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (scaled_consumer, (
                0, y_desc, ring, operands, M, N, K, KIND, HAS_BIAS, ACTIVATION, NEXT, NEXT_KIND, ROUND,
                LOW, HIGH, PTX, RANK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES, WARPS, CONSUMERS)),
            (fill_ring, (
                x_desc, w_desc, ring, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS, PARTS, STAGES)),
        ], [1], [24])
