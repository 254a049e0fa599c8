"""Kernel of segment_attention.py: one warp that copies keys and values, two warpgroups that attend, 64 rows of queries each.

    fill     for every item, for every tile of keys:  wait until its slot is empty,  copy keys and values into it by TMA
    attend   softmax of a tile;  then its sums O += p v and the scores S = q kᵀ of the next one, one warpgroup after the other:
             while one has its softmax, the other has the products

Widths:  a head of D channels is a MAIN block, the greatest power of two in it, and a REST of 16, 32 or 64 or none: 80 = 64 + 16.
         72 is 64 + 16 too; TMA fills what lies outside the head with zeros.
Rows:    a tile of queries lies in one segment.  Segment i has the tiles from ends[i] // ROWS + i on, of which its last may be
         empty: so the number of tiles is known without its lengths, and a tile's segment is found by bisection.
Items:   tiles of queries of unlike lengths: a program takes the next one when it is done with one, by a counter, which the last
         to ask sets to zero again.
Shift:   a softmax is the same whatever is subtracted from its scores, and the greatest score of a row in its first tile is as
         good as that of all while no other is greater by 2^100 after the exponential (2^16 in float16): no maxima, no rescaled
         sums in all tiles but the first.  Items where that was too little are listed, and done again with running maxima.
Masked:  scores of the last tile of keys, and those near the diagonal of a causal segment.  Values behind the segment's end are
         another segment's, and zero times a NaN is a NaN: they are made zeros in shared memory.
"""

# Gluon is known when it is compiled.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mmqc.kernels.shared.gluon_names import async_load, reinterpret

LOWEST = gl.constexpr(-1e30)  # of a score that does not count: finite, for the difference of two infinities is no number
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the threads of a partition; Triton 3.7 renamed it
NONE = gl.constexpr(-1)  # no item: the end of a list, or of what a warp that copies has to copy


@gluon.jit
def find_item(item, ends_ptr, segments, tiles, ROWS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """(Head, first row, start and end of its segment, tiles of keys, how many of them, from the last on, are masked).

    There are no tiles of keys for an empty tile of queries.
    """
    head = item // tiles
    tile = item - head * tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # long ones first
    low = 0
    high = segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(ends_ptr + middle).to(gl.int32) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    start = gl.load(ends_ptr + low).to(gl.int32)
    end = gl.load(ends_ptr + low + 1).to(gl.int32)
    row = start + (tile - start // ROWS - low) * ROWS
    seen = gl.minimum(end, row + ROWS) if CAUSAL else end
    count = gl.where(row < end, gl.cdiv(seen - start, KEYS), 0)
    masked = count - (row - start) // KEYS if CAUSAL else 1
    return head, row, start, end, count, masked


@gluon.jit
def fill_item(
    item, state, q, k, v, ring, mail, ends_ptr, segments, tiles, GROUP: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):
    """Say which item it is, and copy it; (slot, its phase, phase of the queries' places) as they are behind it."""
    q_main, q_rest, k_main, k_rest, v_main, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    slot, phase, turn = state
    ITEM: gl.constexpr = q[0].dtype.primitive_bitwidth // 8
    head, row, start, _end, count, _masked = find_item(item, ends_ptr, segments, tiles, ROWS, KEYS, CAUSAL)
    of_k = head // GROUP
    if count > 0:
        tell(item, mail, q_empty, turn)
        for c in gl.static_range(2):
            mbarrier.expect(q_full.index(c), 64 * (MAIN + REST) * ITEM)
            copy(q[0], head, row + 64 * c, 0, q_full.index(c), q_main.index(c))
            if REST > 0:
                copy(q[1], head, row + 64 * c, MAIN, q_full.index(c), q_rest.index(c))
        turn ^= 1
    for i in range(count):
        key = start + (count - 1 - i) * KEYS
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), KEYS * (MAIN + REST) * ITEM)
        copy(k[0], of_k, key, 0, k_full.index(slot), k_main.index(slot))
        if REST > 0:
            copy(k[1], of_k, key, MAIN, k_full.index(slot), k_rest.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), KEYS * (MAIN + REST) * ITEM)
        copy(v[0], of_k, key, 0, v_full.index(slot), v_main.index(slot))
        if REST > 0:
            copy(v[1], of_k, key, MAIN, v_full.index(slot), v_rest.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return slot, phase, turn


@gluon.jit
def tell(item, mail, q_empty, turn):
    """Put the number of an item where the warpgroups look for it, once both have read the one before."""
    for c in gl.static_range(2):
        mbarrier.wait(q_empty.index(c), turn)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mail.store(gl.full([32], 0, gl.int32, LANES) + item)
    barrier()


@gluon.jit
def end(mail, q_full, q_empty, turn):
    """Say that there are no more items."""
    tell(NONE, mail, q_empty, turn)
    for c in gl.static_range(2):
        mbarrier.arrive(q_full.index(c), count=1)
    return turn ^ 1


@gluon.jit
def fill(
    q, k, v, ring, mail, done, counter_ptr, again_ptr, ends_ptr, segments, tiles, items, GROUP: gl.constexpr,
    MAIN: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):
    """The warp that copies: all items that it gets, and again those in the lists of the warpgroups."""
    q_full, q_empty = ring[6], ring[7]
    slot = 0
    phase = 1
    turn = 1
    item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    while item < items:
        state = (slot, phase, turn)
        slot, phase, turn = fill_item(
            item, state, q, k, v, ring, mail, ends_ptr, segments, tiles, GROUP, MAIN, REST, ROWS, KEYS, STAGES, CAUSAL
        )
        item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    if item == items + gl.num_programs(0) - 1:  # nobody asks any more
        gl.store(counter_ptr, 0)
    turn = end(mail, q_full, q_empty, turn)
    mbarrier.wait(done, 0)
    for c in gl.static_range(2):
        item = gl.load(again_ptr + 2 * (items + gl.program_id(0)) + c, volatile=True)
        while item >= 0:
            state = (slot, phase, turn)
            slot, phase, turn = fill_item(
                item, state, q, k, v, ring, mail, ends_ptr, segments, tiles, GROUP, MAIN, REST, ROWS, KEYS, STAGES, CAUSAL
            )
            item = gl.load(again_ptr + 2 * item + c, volatile=True)
    end(mail, q_full, q_empty, turn)


@gluon.jit
def copy(desc, head, row, column, barrier, tile):
    """A block of rows and channels of one head."""
    whole = reinterpret(tile, tile.dtype, [1, tile.shape[0], tile.shape[1]], desc.layout)
    async_load(desc, [head, row, column], barrier, whole)


@gluon.jit
def scores(q_main, q_rest, k_main, k_rest, slot, s, REST: gl.constexpr):
    """Start S = q kᵀ."""
    s = warpgroup_mma(q_main, k_main.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    if REST > 0:
        s = warpgroup_mma(q_rest, k_rest.index(slot).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def of_thread(p):
    """Sums [64, 4] of the entries that each of a row's four threads has: they are added up at the end, not tile by tile."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def rounded(p, dtype: gl.constexpr):
    """p in 16 bits, here: left to the compiler, the conversions end up behind the wait for the products' turn, and lengthen it."""
    if dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.bfloat16, is_pure=False, pack=2)
    else:
        p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.float16, is_pure=False, pack=2)
    return p


@gluon.jit
def running(s, m, total, factor, columns, high, MASKED: gl.constexpr):
    """(p, m, total, what to multiply the sums with): one more tile of scores of each row, by its greatest score until now."""
    if MASKED:
        counts = columns[None, :] < high[:, None]
        s = gl.where(counts, s, LOWEST)
    m_new = gl.maximum(m, gl.max(s, axis=1) * factor)
    p = gl.exp2(s * factor - m_new[:, None])
    if MASKED:  # a row in front of the whole tile has LOWEST as its greatest, and what rounding makes of their difference is large
        p = gl.where(counts, p, 0.0)
    alpha = gl.exp2(m - m_new)
    of_row: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return p, m_new, total * gl.convert_layout(alpha, of_row)[:, None] + of_thread(p), alpha


@gluon.jit
def shifted(s, m, total, factor, columns, high, MASKED: gl.constexpr):
    """(p, total): one more tile of scores of each row, by a shift that stays."""
    p = gl.exp2(s * factor - m[:, None])
    if MASKED:
        p = gl.where(columns[None, :] < high[:, None], p, 0.0)
    return p, total + of_thread(p)


@gluon.jit
def softmax(
    s, o, o_rest, m, total, factor, columns, high, dtype: gl.constexpr, P: gl.constexpr, MASKED: gl.constexpr,
    RUNNING: gl.constexpr,
):
    """(p as an operand, O, m, total)."""
    if RUNNING:
        p, m, total, alpha = running(s, m, total, factor, columns, high, MASKED)
        o, o_rest = scale_rows(o, alpha), scale_rows(o_rest, alpha)
    else:
        p, total = shifted(s, m, total, factor, columns, high, MASKED)
    return gl.convert_layout(rounded(p, dtype), P), o, o_rest, m, total


@gluon.jit
def add(o, o_rest, p, v_main, v_rest, slot, REST: gl.constexpr):
    """Start O += p v."""
    o = warpgroup_mma(p, v_main.index(slot), o, is_async=True)
    if REST > 0:
        of_rest: gl.constexpr = gl.DotOperandLayout(0, o_rest.type.layout, 2)
        o_rest = warpgroup_mma(gl.convert_layout(p, of_rest), v_rest.index(slot), o_rest, is_async=True)
    return o, o_rest


@gluon.jit
def scale_rows(o, alpha):
    """Each row times its alpha."""
    return o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]


@gluon.jit
def step(
    which: gl.constexpr, q, ring, order, steps, s, o, o_rest, m, total, seen, factor, columns, high, REST: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, P: gl.constexpr, MASKED: gl.constexpr, RUNNING: gl.constexpr,
):
    """Softmax of the tile ``seen`` of the ring and its sums, scores of the next one; the warpgroups take turns in the products."""
    k_main, k_rest, v_main, v_rest, k_full, k_empty, v_full, v_empty = ring
    S: gl.constexpr = s.type.layout
    slot, phase = seen % STAGES, (seen // STAGES) & 1
    after, of_after = (seen + 1) % STAGES, ((seen + 1) // STAGES) & 1
    p, o, o_rest, m, total = softmax(
        s, o, o_rest, m, total, factor, columns, high, v_main.dtype, P, MASKED, RUNNING
    )
    mbarrier.wait(k_full.index(after), of_after)
    mbarrier.wait(v_full.index(slot), phase)
    mbarrier.wait(order.index(which), (steps + 1 - which) & 1)
    s = scores(q[0], q[1], k_main, k_rest, after, gl.zeros((64, KEYS), gl.float32, S), REST)
    o, o_rest = add(o, o_rest, p, v_main, v_rest, slot, REST)
    mbarrier.arrive(order.index(1 - which), count=1)
    s = warpgroup_mma_wait(2 if REST > 0 else 1, deps=(s,))
    mbarrier.arrive(k_empty.index(after), count=1)
    o, o_rest, p, s = warpgroup_mma_wait(0, deps=(o, o_rest, p, s))
    mbarrier.arrive(v_empty.index(slot), count=1)
    return s, o, o_rest, m, total


@gluon.jit
def clear(tile, valid):
    """Make zeros of all rows but the first ``valid`` of a tile in shared memory; others may do the same at the same time."""
    LANES: gl.constexpr = min(32, tile.shape[1] // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    values = tile.load(layout)
    tile.store(gl.where((rows < valid)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def take(mail, q_full, turn):
    """The number of the item whose queries come next."""
    mbarrier.wait(q_full, turn)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(mail.load(LANES), axis=0)


@gluon.jit
def attend_items(
    which: gl.constexpr, y_ptr, ring, order, mail, again_ptr, ends_ptr, segments, T, tiles, factor, stride_y, state,
    D: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RUNNING: gl.constexpr,
):
    """Items until there are no more; (tiles of keys, phase of the queries' place, steps) until now, the last item to do again."""
    q_main, q_rest, k_main, k_rest, v_main, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    keys = (k_main, k_rest, v_main, v_rest, k_full, k_empty, v_full, v_empty)
    q = (q_main.index(which), q_rest.index(which))
    dtype: gl.constexpr = v_main.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST if REST > 0 else 16, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    MOST: gl.constexpr = 6e4 if dtype == gl.float16 else 1e30  # of a sum, so that no part of it is more than the dtype holds
    seen, turn, steps = state
    again = NONE + 0 * seen
    item = take(mail, q_full.index(which), turn)
    while item >= 0:
        head, row, start, end, count, masked = find_item(item, ends_ptr, segments, tiles, ROWS, KEYS, CAUSAL)
        last = start + (count - 1) * KEYS  # first key of the last tile, which comes first
        columns = last + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        rows = row + 64 * which + gl.arange(0, 64, gl.SliceLayout(1, S))
        high = gl.minimum(end, rows + 1) if CAUSAL else end + 0 * rows
        slot, phase = seen % STAGES, (seen // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        s = scores(q[0], q[1], k_main, k_rest, slot, gl.zeros((64, KEYS), gl.float32, S), REST)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if (last + KEYS > end) & (end < T):
            mbarrier.wait(v_full.index(slot), phase)
            clear(v_main.index(slot), end - last)
            if REST > 0:
                clear(v_rest.index(slot), end - last)
            fence_async_shared()
        m = gl.max(gl.where(columns[None, :] < high[:, None], s, LOWEST), axis=1) * factor
        total = of_thread(gl.zeros((64, KEYS), gl.float32, S))
        o = gl.zeros((64, MAIN), gl.float32, SUMS)
        o_rest = gl.zeros((64, REST if REST > 0 else 16), gl.float32, R)
        for i in range(0, gl.minimum(masked, count - 1)):
            s, o, o_rest, m, total = step(
                which, q, keys, order, steps + i, s, o, o_rest, m, total, seen + i, factor, columns, high, REST, KEYS, STAGES, P,
                True, RUNNING,
            )
            columns -= KEYS
        for i in range(masked, count - 1):
            s, o, o_rest, m, total = step(
                which, q, keys, order, steps + i, s, o, o_rest, m, total, seen + i, factor, columns, high, REST, KEYS, STAGES, P,
                False, RUNNING,
            )
        mbarrier.arrive(q_empty.index(which), count=1)
        seen += count
        steps += count - 1
        turn ^= 1
        slot = (seen - 1) % STAGES
        columns = start + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        p, o, o_rest, m, total = softmax(s, o, o_rest, m, total, factor, columns, high, dtype, P, True, RUNNING)
        mbarrier.wait(v_full.index(slot), ((seen - 1) // STAGES) & 1)
        o, o_rest = add(o, o_rest, p, v_main, v_rest, slot, REST)
        o, o_rest, p = warpgroup_mma_wait(0, deps=(o, o_rest, p))
        mbarrier.arrive(v_empty.index(slot), count=1)
        whole = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, S))
        o, o_rest = scale_rows(o, 1 / whole), scale_rows(o_rest, 1 / whole)
        write(o, y_ptr, row + 64 * which, end, head, stride_y, 0, D, MAIN)
        if REST > 0:
            write(o_rest, y_ptr, row + 64 * which, end, head, stride_y, MAIN, D, REST)
        if not RUNNING:
            fits = (whole < MOST) | (rows >= end)  # a NaN does not fit
            if gl.min(fits.to(gl.int32), axis=0) == 0:
                gl.store(again_ptr + 2 * item + which, again)
                again = item
        item = take(mail, q_full.index(which), turn)
    mbarrier.arrive(q_empty.index(which), count=1)
    return seen, turn ^ 1, steps, again


@gluon.jit
def attend(
    which: gl.constexpr, y_ptr, ring, order, mail, done, again_ptr, ends_ptr, segments, T, tiles, items, factor, stride_y,
    D: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """A warpgroup with 64 rows of queries: all items, and again those that did not fit their shift."""
    seen, turn, steps, again = attend_items(
        which, y_ptr, ring, order, mail, again_ptr, ends_ptr, segments, T, tiles, factor, stride_y, (0, 0, 0), D, MAIN, REST,
        ROWS, KEYS, STAGES, CAUSAL, False,
    )
    gl.store(again_ptr + 2 * (items + gl.program_id(0)) + which, again)
    mbarrier.arrive(done, count=1)
    attend_items(
        which, y_ptr, ring, order, mail, again_ptr, ends_ptr, segments, T, tiles, factor, stride_y, (seen, turn, steps), D, MAIN,
        REST, ROWS, KEYS, STAGES, CAUSAL, True,
    )


@gluon.jit
def write(o, y_ptr, row, end, head, stride_y, START: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """y [T, H, D] of this tile and block of channels."""
    layout: gl.constexpr = o.type.layout
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    channels = START + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * stride_y + head * D + channels[None, :]
    gl.store(y_ptr + at, o.to(y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (channels < D)[None, :])


@gluon.jit(do_not_specialize=["segments", "T", "tiles", "items"])
def segment_attention_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc, y_ptr, counter_ptr, again_ptr, ends_ptr, segments, T, tiles,
    items, factor, stride_y, GROUP: gl.constexpr, D: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
):
    """y = softmax(factor q kᵀ within segments) v."""
    SMALL: gl.constexpr = REST if REST > 0 else 16
    dtype: gl.constexpr = q_desc.dtype
    main: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, MAIN], dtype)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, SMALL], dtype)
    some: gl.constexpr = STAGES if REST > 0 else 1
    q_main = gl.allocate_shared_memory(dtype, [2, 64, MAIN], main)
    q_rest = gl.allocate_shared_memory(dtype, [2, 64, SMALL], small)
    k_main = gl.allocate_shared_memory(dtype, [STAGES, KEYS, MAIN], main)
    k_rest = gl.allocate_shared_memory(dtype, [some, KEYS, SMALL], small)
    v_main = gl.allocate_shared_memory(dtype, [STAGES, KEYS, MAIN], main)
    v_rest = gl.allocate_shared_memory(dtype, [some, KEYS, SMALL], small)
    mail = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=2)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    ring = (q_main, q_rest, k_main, k_rest, v_main, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    q = (q_desc, q_rest_desc)
    k = (k_desc, k_rest_desc)
    v = (v_desc, v_rest_desc)
    gl.warp_specialize([
        (attend, (
            0, y_ptr, ring, order, mail, done, again_ptr, ends_ptr, segments, T, tiles, items, factor, stride_y, D, MAIN, REST,
            ROWS, KEYS, STAGES, CAUSAL)),
        (attend, (
            1, y_ptr, ring, order, mail, done, again_ptr, ends_ptr, segments, T, tiles, items, factor, stride_y, D, MAIN, REST,
            ROWS, KEYS, STAGES, CAUSAL)),
        (fill, (
            q, k, v, ring, mail, done, counter_ptr, again_ptr, ends_ptr, segments, tiles, items, GROUP, MAIN, REST, ROWS, KEYS,
            STAGES, CAUSAL)),
    ], [4, 1], [REGISTERS, 24])
