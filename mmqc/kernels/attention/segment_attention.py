"""Attention within the segments of a packed sequence, on Hopper (segment_attention_tiles.py).

    y_i = softmax(s q_i Kᵀ + m_i) V,   m_ij = 0 if segment(i) = segment(j), else −∞;  causal: and j <= i

Shapes:  q [1, H, T, D]   k, v [1, H_kv, T, D] fp16 | bf16, channels contiguous   ends int [n + 1], from 0 to T   y [1, T, H, D]
Why:     one launch for all images of a batch, and for windows; a head of 72 or 80 channels is not padded to 128, as the kernels
         of cuDNN and FlashAttention do.
Apart:   what one segment holds, NaN too, does not reach another.
Exact:   scores, softmax and sums in float32, weights rounded to the dtype of v, as those do.  What is subtracted from the scores
         is a row's greatest one of a tile, not of all (why that is the same: segment_attention_tiles.py).
Arch:    Hopper (wgmma, TMA).  Not in the interpreter, which runs the warps of a program one after the other.
Source:  Shah et al., FlashAttention-3, arXiv:2407.08608, section 3.1 (softmax of one warpgroup under the products of another).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmqc.kernels.shared.compile_ahead import ahead
from mmqc.kernels.shared.device_facts import CONSUMER_REGISTERS, has_warpgroup_products, multiprocessors
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.repeated_launch import repeat
from mmqc.kernels.shared.split_k import Workspace, workspace

HALF = (torch.float16, torch.bfloat16)
LOG2_E = 1 / math.log(2)
ROWS = 128  # of a tile of queries: two warpgroups of 64


class Config(NamedTuple):
    """Tiles of ``keys`` keys, ``stages`` of them in shared memory."""

    keys: int = 128
    stages: int = 2


def widths(d: int) -> tuple[int, int]:
    """(MAIN, REST): the greatest power of two within a head of ``d`` channels, and the least one, at least 16, for what is left."""
    main = 1 << (d.bit_length() - 1)
    rest = 0 if d == main else max(16, 1 << (d - main - 1).bit_length())
    return (2 * main, 0) if rest == main else (main, rest)


def why_not(q: Any, k: Any, v: Any, ends: Any) -> str | None:
    """None, or why these operands are not attended to in this way."""
    if not has_warpgroup_products(q.device):
        return "warpgroup products are Hopper's"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v are of one type, not {q.dtype}, {k.dtype} and {v.dtype}"
    if q.dim() != 4 or q.shape[0] != 1 or k.shape != v.shape or k.shape != (1, k.shape[1], *q.shape[2:]) or q.shape[1] % k.shape[1]:
        return f"one packed sequence [1, H, T, D], not {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if why := why_not_heads(q.dtype, q.shape[3]):
        return why
    if ends.dtype not in (torch.int32, torch.int64) or ends.dim() != 1 or ends.stride(0) != 1 or ends.shape[0] < 2:
        return f"ends of segments int [n + 1], not {ends.dtype} {tuple(ends.shape)}"
    return next((why for why in map(_why_not_copied, (q, k, v)) if why), None)


def why_not_heads(dtype: torch.dtype, d: int) -> str | None:
    """None, or why heads of ``d`` channels are not attended to in this way, whatever their rows."""
    if dtype not in HALF:
        return f"queries in float16 or bfloat16, not {dtype}"
    return None if 16 <= d <= 128 and d % 8 == 0 else f"heads of 16 to 128 channels, a multiple of 8, not {d}"


def _why_not_copied(t: Any) -> str | None:
    if t.stride(3) != 1 or t.stride(1) % 8 or t.stride(2) % 8 or t.data_ptr() % 16:
        return "TMA copies rows whose addresses are multiples of 16 bytes"
    return None


def launch(
    q: Any, k: Any, v: Any, ends: Any, y: Any, scale: float | None, work: Workspace, *, causal: bool = False,
    config: Config | None = None,
) -> Launch:
    """Fill y [1, T, H, D], contiguous; ``why_not`` has found nothing."""
    from mmqc.kernels.attention.segment_attention_tiles import segment_attention_kernel

    _, heads, rows, d = q.shape
    main, rest = widths(d)
    c = config or Config()
    segments = ends.shape[0] - 1
    tiles = rows // ROWS + segments  # of a head; some may be empty
    programs = min(tiles * heads, multiprocessors(q.device))
    # For each item the one before it, and for each program its last one, of those that a warpgroup does again.
    again, counter = work(q.device, 1, tiles * heads + programs, 2, torch.int32)
    small = rest or 16
    blocks = {f"{n}{of}_desc": (1, 64 if n == "q" else c.keys, width)
              for n in "qkv" for of, width in (("", main), ("_rest", small))}  # fmt: skip
    of = {n: t[0] for n, t in (("q", q), ("k", k), ("v", v))}
    args: dict[str, Any] = {name: of[name[0]] for name in blocks} | dict(
        y_ptr=y, counter_ptr=counter, again_ptr=again, ends_ptr=ends, segments=segments, T=rows, tiles=tiles, items=tiles * heads,
        factor=(d**-0.5 if scale is None else scale) * LOG2_E, stride_y=heads * d,
    )
    constants = dict(
        GROUP=heads // k.shape[1], D=d, MAIN=main, REST=rest, ROWS=ROWS, KEYS=c.keys, STAGES=c.stages,
        CAUSAL=causal, REGISTERS=CONSUMER_REGISTERS,
    )
    return Launch(segment_attention_kernel, (programs,), args, constants, ("y_ptr",), 4, 1, 0, blocks)


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None = None, *, causal: bool = False, config: Config | None = None
) -> Tensor:
    """y [1, H, T, D], in memory as [1, T, H, D].

    Raises:
        ValueError: if the operands are not what ``why_not`` asks for.
    """
    if why := why_not(q, k, v, ends):
        raise ValueError(f"segment_attention: {why}")
    _, heads, rows, d = q.shape
    y = q.new_empty((1, rows, heads, d))
    if rows:
        layout = *(t.shape for t in (q, k, ends)), *(t.stride() for t in (q, k, v))
        key = "segment_attention", layout, q.dtype, ends.dtype, scale, causal, config
        repeat(key, (q, k, v, ends, y), lambda new, work: [launch(q, k, v, ends, y, scale, work, causal=causal, config=config)])
    return y.transpose(1, 2)


def prepare(q: Tensor, k: Tensor, ends: Tensor, *, causal: bool = False) -> None:
    """Begin to compile the kernel for heads like these, if there is one; the tensors may be traced ones."""
    if has_warpgroup_products(q.device) and why_not_heads(q.dtype, q.shape[3]) is None:
        _prepare(q.shape[1], k.shape[1], q.shape[3], q.dtype, ends.dtype, causal, q.device)


@functools.cache
def _prepare(
    heads: int, kv_heads: int, d: int, dtype: torch.dtype, of_ends: torch.dtype, causal: bool, device: torch.device
) -> None:
    def launches() -> Iterator[Launch]:  # made by a worker: here tensors may be traced
        q, k = (torch.empty((1, count, ROWS, d), dtype=dtype, device="meta") for count in (heads, kv_heads))
        ends = torch.empty(2, dtype=of_ends, device="meta")
        yield launch(q, k, k, ends, q, None, workspace, causal=causal)

    ahead(launches(), device)
