"""Attention within the segments of a packed sequence by plain Triton: what a package holds, which has no Python to choose by.

    y_i = softmax(s q_i Kᵀ + m_i) V,   m_ij = 0 if segment(i) = segment(j), else −∞;  causal: and j <= i

Shapes:  q [T, H, D]   k, v [T, H_kv, D] fp16 | bf16 (fp32 in the interpreter)   ends int [n + 1], from 0 to T   y [T, H, D]
Why:     torch's own ops need a mask of T x T: 1.3 GB in bfloat16 for 25,600 patches, all of whose scores are computed, whatever the
         windows.  Gluon's kernel (segment_attention.py) is faster, and cannot be written into a package.
Rows:    a tile of queries lies in one segment, and is found as there (segment_attention_tiles.py): the number of tiles does not
         depend on the lengths, so that none is read by the host.
Widths:  a head is a power of two and a rest: 80 = 64 + 16, which no product pads to 128.
Apart:   what one segment holds, NaN too, does not reach another.
Exact:   scores, softmax and sums in float32; probabilities are rounded to v's dtype in front of the product with v.
Arch:    Ampere and newer.
Source:  Dao, FlashAttention-2, arXiv:2307.08691, section 3.1.
"""

# Triton's values are no Python values to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.attention.segment_attention import HALF, widths
from mmqc.kernels.shared.device_facts import shared_bytes, why_not_here
from mmqc.kernels.shared.launch import Launch

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # of a score that does not count: finite, for the difference of two infinities is no number


class Config(NamedTuple):
    """Tiles of ``rows`` queries and ``keys`` keys, ``stages`` of the latter in shared memory."""

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


def configured(d: int, shared: int) -> Config:
    """The tiles of heads of ``d`` channels where a program may have ``shared`` bytes: measured on an H200, otherwise what fits."""
    main, rest = widths(d)
    rows = 128 if rest and main <= 64 else 64
    fits = ((keys, stages) for keys, stages in ((64, 3), (64, 2)) if 2 * (main + rest) * (rows + 2 * stages * keys) <= shared)
    keys, stages = next(fits, (32, 2))
    return Config(rows, keys, 4, stages)


@triton.jit
def find_segment(ends_ptr, segments, tile, ROWS: tl.constexpr):
    """(First row, start, end of its segment) of a tile of queries; an empty tile's first row is not in front of the end."""
    low = segments * 0
    high = segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        inside = tl.load(ends_ptr + middle).to(tl.int32) // ROWS + middle <= tile
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    start = tl.load(ends_ptr + low).to(tl.int32)
    end = tl.load(ends_ptr + low + 1).to(tl.int32)
    return start + (tile - start // ROWS - low) * ROWS, start, end


@triton.jit
def load_rows(ptr, rows, end, stride, C0: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Channels from ``C0`` on of some rows: zeros behind ``end`` and behind the head."""
    c = C0 + tl.arange(0, WIDTH)
    at = rows[:, None].to(tl.int64) * stride + c[None, :]
    if MASKED:
        return tl.load(ptr + at, mask=(rows < end)[:, None] & (c < D)[None, :], other=0.0)
    if C0 + WIDTH > D:
        return tl.load(ptr + at, mask=(c < D)[None, :], other=0.0)
    return tl.load(ptr + at)


@triton.jit
def add_keys(
    q, q_rest, k_ptr, v_ptr, first, rows, end, stride, top, total, y, y_rest, SCALE: tl.constexpr, D: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, SMALL: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):
    """The running sums with a tile of keys added."""
    j = first + tl.arange(0, KEYS)
    x = tl.dot(q, tl.trans(load_rows(k_ptr, j, end, stride, 0, MAIN, D, MASKED)), input_precision="ieee")
    if REST:
        x = tl.dot(q_rest, tl.trans(load_rows(k_ptr, j, end, stride, MAIN, SMALL, D, MASKED)), x, input_precision="ieee")
    x = x * (SCALE * LOG2E)
    if MASKED:
        seen = (j < end)[None, :]
        if CAUSAL:
            seen = seen & (j[None, :] <= rows[:, None])
        x = tl.where(seen, x, LOWEST)
    new = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x - new[:, None])
    fade = tl.exp2(top - new)
    v = load_rows(v_ptr, j, end, stride, 0, MAIN, D, MASKED)
    y = tl.dot(p.to(v.dtype), v, y * fade[:, None], input_precision="ieee")
    if REST:
        v_rest = load_rows(v_ptr, j, end, stride, MAIN, SMALL, D, MASKED)
        y_rest = tl.dot(p.to(v_rest.dtype), v_rest, y_rest * fade[:, None], input_precision="ieee")
    return new, total * fade + tl.sum(p, 1), y, y_rest


@triton.jit(do_not_specialize=("segments",))
def packed_attention_kernel(
    q_ptr, k_ptr, v_ptr, ends_ptr, y_ptr, segments, SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, SMALL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Tile ``program_id(0)`` of queries of head ``program_id(1)``."""
    head = tl.program_id(1)
    row, start, end = find_segment(ends_ptr, segments, tl.program_id(0), ROWS)
    if row >= end:
        return
    rows = row + tl.arange(0, ROWS)
    q_ptr += head * D
    stride: tl.constexpr = HEADS // GROUP * D
    k_ptr += head // GROUP * D
    v_ptr += head // GROUP * D
    q = load_rows(q_ptr, rows, end, HEADS * D, 0, MAIN, D, True)
    q_rest = load_rows(q_ptr, rows, end, HEADS * D, MAIN if REST else 0, SMALL, D, True)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, MAIN], tl.float32)
    y_rest = tl.zeros([ROWS, SMALL], tl.float32)
    last = tl.minimum(end, row + ROWS) if CAUSAL else end
    whole = start + ((row if CAUSAL else end) - start) // KEYS * KEYS  # tiles that all rows see all of
    for first in range(start, whole, KEYS):
        top, total, y, y_rest = add_keys(q, q_rest, k_ptr, v_ptr, first, rows, end, stride, top, total, y, y_rest,
                                         SCALE, D, MAIN, REST, SMALL, KEYS, CAUSAL, False)  # fmt: skip
    for first in range(whole, last, KEYS):
        top, total, y, y_rest = add_keys(q, q_rest, k_ptr, v_ptr, first, rows, end, stride, top, total, y, y_rest,
                                         SCALE, D, MAIN, REST, SMALL, KEYS, CAUSAL, True)  # fmt: skip
    y_ptr += rows[:, None].to(tl.int64) * (HEADS * D) + head * D
    c, c_rest = tl.arange(0, MAIN), MAIN + tl.arange(0, SMALL)
    inside = (rows < end)[:, None]
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptr + c[None, :], (y / total[:, None]).to(dtype), mask=inside & (c < D)[None, :])
    if REST:
        tl.store(y_ptr + c_rest[None, :], (y_rest / total[:, None]).to(dtype), mask=inside & (c_rest < D)[None, :])


def why_not(q: Any, k: Any, v: Any) -> str | None:
    """None, or why these operands (q [1, H, T, D], k, v [1, H_kv, T, D]) are not attended to in this way; they may be traced."""
    if reason := why_not_here(q):
        return reason
    if q.is_cuda and q.dtype not in HALF:
        return f"queries in float16 or bfloat16, not {q.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v are of one type, not {q.dtype}, {k.dtype} and {v.dtype}"
    *heads, d = (q.shape[1], k.shape[1], q.shape[3])
    if not all(type(size) is int for size in (*heads, d)) or heads[0] % heads[1] or k.shape[3] != d or v.shape[3] != d:
        return f"heads of one width, not {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    fits = q.shape[0] == 1 and 16 <= d <= 256
    return None if fits else f"one packed sequence of heads of 16 to 256 channels, not {tuple(q.shape)}"


def launch(
    q: Any, k: Any, v: Any, ends: Any, y: Any, scale: float | None, *, causal: bool = False, config: Config | None = None
) -> Launch:
    """Fill y [T, H, D]; all in row-major order; T and the number of segments may be symbols of a graph."""
    rows, heads, d = q.shape
    c = config or configured(d, shared_bytes(q.device))
    main, rest = widths(d)
    return Launch(
        kernel=packed_attention_kernel,
        grid=(rows // c.rows + ends.shape[0] - 1, heads),
        args=dict(q_ptr=q, k_ptr=k, v_ptr=v, ends_ptr=ends, y_ptr=y, segments=ends.shape[0] - 1),
        constants=dict(
            SCALE=d**-0.5 if scale is None else scale, HEADS=heads, GROUP=heads // k.shape[1], D=d, MAIN=main, REST=rest,
            SMALL=rest or 16, ROWS=c.rows, KEYS=c.keys, CAUSAL=causal,
        ),
        outputs=("y_ptr",),
        num_warps=c.warps,
        num_stages=c.stages,
    )  # fmt: skip


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None = None, *, causal: bool = False, config: Config | None = None
) -> Tensor:
    """y [1, H, T, D], in memory as [1, T, H, D], for q [1, H, T, D].

    Raises:
        ValueError: if the operands are not what ``why_not`` asks for.
    """
    if why := why_not(q, k, v):
        raise ValueError(f"packed_attention: {why}")
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
    y = torch.empty_like(q)
    if len(q):
        launch(q, k, v, ends, y, scale, causal=causal, config=config).run()
    return y[None].transpose(1, 2)
