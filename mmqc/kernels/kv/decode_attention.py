"""Attention of one new token's query heads over a cache, in parts of the cache at once (ops/decode_attention.py).

    a program     the sums of one head's rows over some tiles of tokens; the last program of a head adds the parts

Shapes:  those of the op; fp16 | bf16 (fp32 in the interpreter)   D to 256   R to 64   masks with contiguous tokens
Exact:   scores and sums in float32; probabilities are rounded to q's dtype in front of the product with v.
Bytes:   of k and v, from the first token that the mask shows to the last, once; of the parts, 2 x 4 (D + 2) for a row of a program.
Why:     rows of a group are one product's, so that a KV head is read once for all of them, and a cache of one sequence is read by
         every multiprocessor: a kernel made for prompts gives each head to one of them (cuDNN 9: 42 us for 2,048 tokens, H100).
Arch:    Ampere and newer.
"""

# Triton's values are no Python values to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.kv.kv_words import LOG2E, LOWEST
from mmqc.kernels.shared.device_facts import ceil_div, multiprocessors, power_of_two, shared_bytes, why_not_here
from mmqc.kernels.shared.early_start import await_inputs, early_lines
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import Refusal, first_reason
from mmqc.kernels.shared.split_k import workspace
from mmqc.ops.decode_attention import check

DTYPES = (torch.float16, torch.bfloat16)
MOST_ROWS = 64
BESIDE = 1024  # bytes that sums over tokens take
MASK_TOKENS = 2048  # of a mask, read at once


class Config(NamedTuple):
    """Programs of a multiprocessor, and tokens of a tile; ``by_number``: whether few parts are added as few."""

    per_sm: int = 2
    tokens: int = 64
    warps: int = 2
    stages: int = 2
    by_number: bool = False


# Of few heads a program has a tile or two, and many parts are added.  Where there is a multiprocessor for every head, or half of
# one, a program has all that the shared memory holds, and hardly any parts are.  More heads have small tiles, so that many run at
# once: benchmarks/results/decode_tiles.json.
FEW, SMALL = Config(), Config(tokens=32, stages=3, by_number=True)
WHOLE, HALF = (Config(per_sm=1, tokens=tokens, warps=4, stages=3, by_number=True) for tokens in (128, 64))
FEWEST, FEWER = 16, 32  # heads up to which a head has many parts, of large tiles and of small ones


def configs(device: torch.device, rows: int, width: int, item_bytes: int = 2) -> tuple[tuple[Config, int | None], ...]:
    """The tiles, each for up to so many heads of all sequences, the last of them for any number."""
    units, most = multiprocessors(device), shared_bytes(device)
    wide = [(c, n * units) for n, c in ((1, WHOLE), (2, HALF)) if stages_of(c, rows, width, item_bytes, most // n) == c.stages]
    return (FEW, FEWEST), (SMALL, FEWER), *((c, last) for c, last in wide if last > FEWER), (SMALL, None)


def config_of(heads: int, device: torch.device, rows: int, width: int, item_bytes: int = 2) -> Config:
    """For so many heads of all sequences."""
    return next(config for config, last in configs(device, rows, width, item_bytes) if last is None or heads <= last)


@triton.jit
def span_of(mask_ptr, tokens, MB: tl.constexpr):
    """The first token that a mask shows, and the one behind the last; (tokens, 0) if it shows none."""
    first, last = tokens, 0
    m = tl.arange(0, MB)
    for start in range(0, tokens, MB):
        at = start + m
        shown = tl.load(mask_ptr + at, mask=at < tokens, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(shown, at, tokens), 0))
        last = tl.maximum(last, tl.max(tl.where(shown, at + 1, 0), 0))
    return first, last


@triton.jit
def shown(mask_ptr, t, inside, HAS_MASK: tl.constexpr):
    """Which tokens ``t`` count, of those ``inside``."""
    if HAS_MASK:
        return tl.load(mask_ptr + t, mask=inside, other=0) != 0
    return inside


@triton.jit
def add_tile(q, k, v, seen, top, total, acc, SCALE: tl.constexpr):
    """The running sums with a tile of tokens [BT, D] added: relative to a power of two, which grows with the scores."""
    x = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * (SCALE * LOG2E), float("-inf"))
    new = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x - new[:, None])
    fade = tl.exp2(top - new)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new, total * fade + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=("tokens", "programs", "stride_m"))
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, y_ptr, part_ptr, counter_ptr, heads, tokens, programs, stride_m,
    SCALE: tl.constexpr, ROWS: tl.constexpr, RB: tl.constexpr, RC: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BT: tl.constexpr, MB: tl.constexpr, SB: tl.constexpr, HAS_MASK: tl.constexpr, BY_NUMBER: tl.constexpr, EARLY: tl.constexpr,
):
    """Part ``program_id(1)`` of head ``program_id(0)``; how many parts there are follows from the tokens that its mask shows."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    all_heads = tl.num_programs(0)
    if EARLY:
        await_inputs()
    r, c = tl.arange(0, RB), tl.arange(0, DP)
    rows = (r < ROWS)[:, None] & (c < D)[None, :]
    at = r[:, None] * D + c[None, :]
    q = tl.load(q_ptr + head * ROWS * D + at, mask=rows, other=0.0)  # on its way while the mask is read
    first, last = tokens * 0, tokens
    a_tile_each = (tl.cdiv(tokens, BT) <= SB) & (tl.cdiv(tokens, BT) * all_heads <= programs)
    if HAS_MASK:
        mask_ptr += head // heads * stride_m
        if not a_tile_each:
            first, last = span_of(mask_ptr, tokens, MB)
    tiles = tl.maximum(tl.cdiv(last, BT) - first // BT, 1)
    steps = tl.cdiv(tiles * all_heads, programs)
    splits = tl.cdiv(tiles, steps)
    if split >= splits:
        return
    top = tl.full([RB], LOWEST, tl.float32)
    total = tl.zeros([RB], tl.float32)
    acc = tl.zeros([RB, DP], tl.float32)
    k_ptr += head * tokens * D
    v_ptr += head * tokens * D
    begin = (first // BT + split * steps) * BT
    if HAS_MASK and a_tile_each:
        # All loads at once, of the mask too: a token that is not shown may be anything, and 0 times that a NaN.
        t = begin + tl.arange(0, BT)
        inside = (t < tokens)[:, None] & (c < D)[None, :]
        there = t[:, None].to(tl.int64) * D + c[None, :]
        seen = shown(mask_ptr, t, t < tokens, HAS_MASK)
        k = tl.load(k_ptr + there, mask=inside, other=0.0)
        v = tl.load(v_ptr + there, mask=inside, other=0.0)
        top, total, acc = add_tile(q, k, tl.where(seen[:, None], v, 0.0), seen, top, total, acc, SCALE)
    else:
        for start in range(begin, tl.minimum(begin + steps * BT, last), BT):
            t = start + tl.arange(0, BT)
            seen = (t >= first) & (t < last)
            inside = seen[:, None] & (c < D)[None, :]
            there = t[:, None].to(tl.int64) * D + c[None, :]
            k = tl.load(k_ptr + there, mask=inside, other=0.0)
            v = tl.load(v_ptr + there, mask=inside, other=0.0)
            top, total, acc = add_tile(q, k, v, shown(mask_ptr, t, seen, HAS_MASK), top, total, acc, SCALE)
    if splits == 1:
        y = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(y_ptr + head * ROWS * D + at, y.to(y_ptr.dtype.element_ty), mask=rows)
        return
    most = tl.cdiv(programs, all_heads)
    room = (most * all_heads).to(tl.int64) * ROWS
    part = (head * most + split) * ROWS
    tl.store(part_ptr + part * D + at, acc, mask=rows, cache_modifier=".cg")
    facts = part_ptr + room * D
    tl.store(facts + part + r, top, mask=r < ROWS, cache_modifier=".cg")
    tl.store(facts + room + part + r, total, mask=r < ROWS, cache_modifier=".cg")
    # All threads' stores come before the barrier, the barrier before the one releasing atomic.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + head, 1, sem="acq_rel") == splits - 1:
        y_ptr += head * ROWS * D
        parts = head * most
        if BY_NUMBER:
            add_by_number(part_ptr, facts, facts + room, y_ptr, parts, splits, ROWS, RC, D, DP, SB)
        else:
            add_parts(part_ptr, facts, facts + room, y_ptr, parts, splits, ROWS, RC, D, DP, SB)
        tl.store(counter_ptr + head, 0)


@triton.jit
def add_by_number(
    part_ptr, top_ptr, total_ptr, y_ptr, first, splits, ROWS: tl.constexpr, RC: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SB: tl.constexpr,
):
    """``add_parts`` in blocks of 2 or 4 where there are no more: each entry of a block costs, used or not."""
    if splits <= 2:
        add_parts(part_ptr, top_ptr, total_ptr, y_ptr, first, splits, ROWS, RC, D, DP, 2 if SB > 2 else SB)
    elif splits <= 4:
        add_parts(part_ptr, top_ptr, total_ptr, y_ptr, first, splits, ROWS, RC, D, DP, 4 if SB > 4 else SB)
    else:
        add_parts(part_ptr, top_ptr, total_ptr, y_ptr, first, splits, ROWS, RC, D, DP, SB)


@triton.jit
def add_parts(
    part_ptr, top_ptr, total_ptr, y_ptr, first, splits, ROWS: tl.constexpr, RC: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SB: tl.constexpr,
):
    """Y of a head from its parts, each relative to a power of two of its own: SB of them at a time, in order."""
    s, r, c = tl.arange(0, SB), tl.arange(0, RC), tl.arange(0, DP)
    inside = (r < ROWS)[:, None] & (c < D)[None, :]
    top = tl.full([RC], LOWEST, tl.float32)
    total = tl.zeros([RC], tl.float32)
    acc = tl.zeros([RC, DP], tl.float32)
    for start in range(0, splits, SB):
        here = (start + s)[:, None] < splits
        row = (first + start + s)[:, None] * ROWS + r[None, :]
        known = here & (r < ROWS)[None, :]
        tops = tl.load(top_ptr + row, mask=known, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(total_ptr + row, mask=known, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            part_ptr + row[:, :, None] * D + c[None, None, :], mask=here[:, :, None] & inside[None, :, :], other=0.0,
            cache_modifier=".cg",
        )
        new = tl.maximum(top, tl.max(tops, 0))
        fade, weight = tl.exp2(top - new), tl.exp2(tops - new[None, :])
        total = total * fade + tl.sum(totals * weight, 0)
        acc = acc * fade[:, None] + tl.sum(parts * weight[:, :, None], 0)
        top = new
    y = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(y_ptr + r[:, None] * D + c[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


def why_not(q: Any, k: Any, mask: Any) -> str | None:
    """None, or why these rows cannot be attended with here: of shapes and dtypes, of tensors or what stands for them."""
    (_, _, rows, width), counted = q.shape, (q.shape[2], q.shape[3])
    return first_reason((
        (q.dtype == k.dtype and (q.dtype in DTYPES or q.device.type == "cpu"), f"q, k and v are one of {DTYPES}, not {q.dtype}"),
        (all(isinstance(n, int) for n in counted), "the numbers of rows and channels are known"),
        (not isinstance(rows, int) or rows <= MOST_ROWS, f"at most {MOST_ROWS} rows are one product, not {rows}"),
        (not isinstance(width, int) or width <= 256, f"heads have 256 channels at most, not {width}"),
        (mask is None or mask.dtype == torch.bool, "a mask is bool"),
    )) or why_not_here(q, k)


def launch(
    q: Any, k: Any, v: Any, mask: Any, y: Any, part: Any, counter: Any, scale: float, *, heads: tuple[Any, Any], tokens: Any,
    most: int, programs: int, config: Config,
) -> Launch:
    """The kernel over all parts of all heads; sizes may be symbols of a graph.

    All tensors are row-major; ``part`` is float32 [``room``], ``counter`` zeros [B H], ``heads`` (B, H).  There may be ``most``
    parts of a head, and all heads together have ``programs`` of them, but for rounding.
    """
    rows, width = q.shape[2], q.shape[3]
    padded = power_of_two(width, 16)
    few = power_of_two(rows)
    early = early_lines(q.device, rows) > 0
    return Launch(
        kernel=decode_attention_kernel,
        grid=(heads[0] * heads[1], most),
        args=dict(
            q_ptr=q, k_ptr=k, v_ptr=v, mask_ptr=q if mask is None else mask, y_ptr=y, part_ptr=part, counter_ptr=counter,
            heads=heads[1], tokens=tokens, programs=programs,
            stride_m=0 if mask is None or mask.shape[0] == 1 else tokens,
        ),
        constants=dict(
            SCALE=scale, ROWS=rows, RB=power_of_two(rows, 16), RC=few, D=width, DP=padded, BT=config.tokens,
            MB=MASK_TOKENS, SB=max(1, min(16, 16384 // (few * padded))), HAS_MASK=mask is not None,
            BY_NUMBER=config.by_number, EARLY=early,
        ),
        outputs=("y_ptr", "part_ptr", "counter_ptr"),
        num_warps=config.warps,
        num_stages=stages_of(config, rows, width, q.dtype.itemsize, shared_bytes(q.device)),
        early=early,
    )  # fmt: skip


def stages_of(config: Config, rows: int, width: int, item_bytes: int, most: int) -> int:
    """Those of ``config``, or as many as ``most`` bytes of shared memory hold."""
    padded = power_of_two(width, 16)
    tile, beside = 2 * config.tokens * padded * item_bytes, BESIDE + power_of_two(rows, 16) * (padded + config.tokens) * item_bytes
    return max(1, min(config.stages, 1 + (most - beside) // tile))


def room(programs: int, heads: Any, rows: int, width: int) -> Any:
    """Entries of the buffer of parts: a head has at most its share of the programs, rounded up."""
    return (programs + heads) * rows * (width + 2)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, config: Config | None = None
) -> Tensor | Refusal:
    """What the op gives, or why it is not had here."""
    check(q, k, v, mask)
    if reason := why_not(q, k, mask):
        return Refusal(reason)
    q, k, v = (x.contiguous() for x in (q, k, v))
    mask = None if mask is None else mask.contiguous()
    (batch, heads, rows, width), tokens = q.shape, k.shape[2]
    c = config or config_of(batch * heads, q.device, rows, width, q.element_size())
    y = torch.zeros_like(q) if tokens == 0 else torch.empty_like(q)
    if not y.numel() or not tokens:
        return y
    programs, tiles = c.per_sm * multiprocessors(q.device), ceil_div(tokens, c.tokens)
    _, counter = workspace(q.device, batch * heads, 0, 2, torch.float32)
    part = q.new_empty(room(programs, batch * heads, rows, width), dtype=torch.float32)
    most = min(tiles, ceil_div(programs, batch * heads))
    launch(
        q, k, v, mask, y, part, counter, scale, heads=(batch, heads), tokens=tokens, most=most, programs=programs, config=c
    ).run()
    return y
