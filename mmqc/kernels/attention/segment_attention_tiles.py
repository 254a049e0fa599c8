"""Kernel of segment_attention.py: one warp that copies keys and values, warpgroups that attend, 64 rows of queries each.

    fill     for every item, for every tile of keys:  wait until its slot is empty,  copy keys and values into it by TMA
    attend   S = q kᵀ of the next tile and O += p v of this one are under way together;  softmax of the next one meanwhile

Widths:  a head of D channels is a MAIN block, the greatest power of two in it, and a REST of 16, 32 or 64 or none: 80 = 64 + 16.
         72 is 64 + 16 too; TMA fills what lies outside the head with zeros.
Rows:    a tile of queries lies in one segment.  Segment i has the tiles from ends[i] // ROWS + i on, of which its last may be
         empty: so the number of tiles is known without its lengths, and a tile's segment is found by bisection.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOWEST = gl.constexpr(-1e30)  # of a score that does not count: finite, for the difference of two infinities is no number


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
def fill(
    q, k, v, ring, ends_ptr, segments, tiles, items, GROUP: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):
    """The warp that copies."""
    q_main, q_rest, k_main, k_rest, v_main, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    ITEM: gl.constexpr = q[0].dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1
    turn = 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, row, start, _end, count, _masked = find_item(item, ends_ptr, segments, tiles, ROWS, KEYS, CAUSAL)
        of_k = head // GROUP
        if count > 0:
            for c in gl.static_range(2):
                mbarrier.wait(q_empty.index(c), turn)
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


@gluon.jit
def copy(desc, head, row, column, barrier, tile):
    """A block of rows and channels of one head."""
    whole = tile._reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], desc.layout)
    tma.async_copy_global_to_shared(desc, [head, row, column], barrier, whole)


@gluon.jit
def scores(q_main, q_rest, k_main, k_rest, slot, s, REST: gl.constexpr):
    """Start S = q kᵀ."""
    s = warpgroup_mma(q_main, k_main.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    if REST > 0:
        s = warpgroup_mma(q_rest, k_rest.index(slot).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def softmax(s, m, total, factor, columns, high, MASKED: gl.constexpr):
    """(p, m, total, what to multiply the sums with): one more tile of scores of each row."""
    if MASKED:
        counts = columns[None, :] < high[:, None]
        s = gl.where(counts, s, LOWEST)
    m_new = gl.maximum(m, gl.max(s, axis=1) * factor)
    p = gl.exp2(s * factor - m_new[:, None])
    if MASKED:  # a row in front of the whole tile has LOWEST as its greatest, and what rounding makes of their difference is large
        p = gl.where(counts, p, 0.0)
    alpha = gl.exp2(m - m_new)
    return p, m_new, total * alpha + gl.sum(p, axis=1), alpha


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
def hold(total):
    """The sums of a row, known before anything behind this: without it, ptxas waits for the products before the softmax.

    A sum is never less than zero, so nothing happens here; but what happened would have to stay in its place.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p bar.warp.sync 0xffffffff; mov.b32 $0, $1; }", "=r,r", [total],
        gl.float32, False, 1,
    )


@gluon.jit
def step(
    q, ring, p, o, o_rest, m, total, seen, factor, columns, high,
    REST: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr,
):
    """Scores of tile ``seen`` of the ring, sums of the one before: the products of both are under way at the same time."""
    k_main, k_rest, v_main, v_rest, k_full, k_empty, v_full, v_empty = ring
    slot, last, of_last = seen % STAGES, (seen - 1) % STAGES, ((seen - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(slot), (seen // STAGES) & 1)
    s = gl.zeros((64, KEYS), gl.float32, S)
    s = scores(q[0], q[1], k_main, k_rest, slot, s, REST)
    mbarrier.wait(v_full.index(last), of_last)
    o, o_rest = add(o, o_rest, p, v_main, v_rest, last, REST)
    s = warpgroup_mma_wait(2 if REST > 0 else 1, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    p_new, m, total, alpha = softmax(s, m, total, factor, columns, high, MASKED)
    total = hold(total)
    p_new = gl.convert_layout(p_new.to(p.dtype), p.type.layout)
    o, o_rest, p, total, p_new = warpgroup_mma_wait(0, deps=(o, o_rest, p, total, p_new))
    mbarrier.arrive(v_empty.index(last), count=1)
    return p_new, scale_rows(o, alpha), scale_rows(o_rest, alpha), m, total


@gluon.jit
def clear(tile, valid):
    """Make zeros of all rows but the first ``valid`` of a tile in shared memory; others may do the same at the same time."""
    LANES: gl.constexpr = min(32, tile.shape[1] // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    values = tile.load(layout)
    tile.store(gl.where((rows < valid)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def attend(
    which: gl.constexpr, y_ptr, ring, ends_ptr, segments, T, tiles, items, factor, stride_y, D: gl.constexpr,
    MAIN: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """A warpgroup with 64 rows of queries."""
    q_main, q_rest, k_main, k_rest, v_main, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    keys = (k_main, k_rest, v_main, v_rest, k_full, k_empty, v_full, v_empty)
    q = (q_main.index(which), q_rest.index(which))
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST if REST > 0 else 16, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    seen = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, row, start, end, count, masked = find_item(item, ends_ptr, segments, tiles, ROWS, KEYS, CAUSAL)
        if count > 0:
            last = start + (count - 1) * KEYS  # first key of the last tile, which comes first
            columns = last + gl.arange(0, KEYS, gl.SliceLayout(0, S))
            rows = row + 64 * which + gl.arange(0, 64, gl.SliceLayout(1, S))
            high = gl.minimum(end, rows + 1) if CAUSAL else end + 0 * rows
            slot, phase = seen % STAGES, (seen // STAGES) & 1
            mbarrier.wait(q_full.index(which), turn)
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
            m = gl.full((64,), LOWEST, gl.float32, gl.SliceLayout(1, S))
            total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, S))
            p_new, m, total, _alpha = softmax(s, m, total, factor, columns, high, True)
            p = gl.convert_layout(p_new.to(v_main.dtype), P)
            o = gl.zeros((64, MAIN), gl.float32, SUMS)
            o_rest = gl.zeros((64, REST if REST > 0 else 16), gl.float32, R)
            for i in range(1, masked):
                columns -= KEYS
                p, o, o_rest, m, total = step(
                    q, keys, p, o, o_rest, m, total, seen + i, factor, columns, high, REST, KEYS, STAGES, True, S
                )
            for i in range(masked, count):
                p, o, o_rest, m, total = step(
                    q, keys, p, o, o_rest, m, total, seen + i, factor, columns, high, REST, KEYS, STAGES, False, S
                )
            mbarrier.arrive(q_empty.index(which), count=1)
            seen += count
            turn ^= 1
            slot = (seen - 1) % STAGES
            mbarrier.wait(v_full.index(slot), ((seen - 1) // STAGES) & 1)
            o, o_rest = add(o, o_rest, p, v_main, v_rest, slot, REST)
            o, o_rest, p = warpgroup_mma_wait(0, deps=(o, o_rest, p))
            mbarrier.arrive(v_empty.index(slot), count=1)
            o, o_rest = scale_rows(o, 1 / total), scale_rows(o_rest, 1 / total)
            write(o, y_ptr, row + 64 * which, end, head, stride_y, 0, D, MAIN)
            if REST > 0:
                write(o_rest, y_ptr, row + 64 * which, end, head, stride_y, MAIN, D, REST)


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
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc, y_ptr, ends_ptr, segments, T, tiles, items, factor,
    stride_y, GROUP: gl.constexpr, D: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
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
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
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
            0, y_ptr, ring, ends_ptr, segments, T, tiles, items, factor, stride_y, D, MAIN, REST, ROWS, KEYS, STAGES, CAUSAL)),
        (attend, (
            1, y_ptr, ring, ends_ptr, segments, T, tiles, items, factor, stride_y, D, MAIN, REST, ROWS, KEYS, STAGES, CAUSAL)),
        (fill, (q, k, v, ring, ends_ptr, segments, tiles, items, GROUP, MAIN, REST, ROWS, KEYS, STAGES, CAUSAL)),
    ], [4, 1], [REGISTERS, 24])
