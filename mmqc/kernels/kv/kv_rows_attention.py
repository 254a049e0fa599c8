"""Attention to tokens in rows of bytes (ops/kv_rows_attention.py): rows are unpacked in registers, nothing is dequantized.

    splits of the sums, each of a stretch of one head's tokens  ->  sum of the splits

Shapes:  those of the op, any number of queries; fp16 | bf16 (fp32 in the interpreter)   D to 256   one or two parts of 4 to 8 bits
Exact:   codes, and so the products of queries and keys but for their float32 sums.  Rounded to q's dtype is π s_V.  In fp16 it
         is stored times 2^(b-2): the widest range cannot overflow.
Why:     a row's scales and offsets are read with its codes, and multiply scores and probabilities; query heads are rows of one
         product, so that a KV head's rows are read once for 16 of them.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.kernels.kv.kv_rows_attention_tiles import kv_rows_split_kernel
from mmqc.kernels.kv.kv_token_attention import DTYPES, TokenConfig, alignment
from mmqc.kernels.kv.kv_token_attention_tiles import kv_token_combine_kernel
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx, multiprocessors, power_of_two, why_not_here
from mmqc.kernels.shared.plan import Refusal
from mmqc.ops.kv_rows_attention import check
from mmqc.ops.pack import packed_width

TOGETHER = 16  # rows of queries in one product: as many as the smallest tile of a tensor core has


def why_not(q: Tensor, k_rows: Tensor, v_rows: Tensor, widths: Sequence[int], bits: Sequence[int]) -> str | None:
    """None, or why these operands cannot be attended to here."""
    given = (q, k_rows, v_rows)
    checks = (
        (q.dtype in DTYPES, f"queries are one of {DTYPES}, not {q.dtype}"),
        (q.shape[3] <= 256, f"heads have 256 channels at most, not {q.shape[3]}"),
        (len(bits) <= 2 and min(bits) >= 4, f"bits = {list(bits)}: one or two parts of 4 to 8"),
        (all(t.stride(3) == 1 for t in given), "channels and bytes are contiguous"),
        (all(t.stride(2) == t.shape[3] for t in given[1:]), "the rows of a head are contiguous"),
        (all(t.shape[2] * t.stride(2) < 2**31 for t in given), "a head's rows are addressed with 32 bits"),
        (k_rows.shape[0] * k_rows.shape[1] < 2**16, "at most 65,535 sequences times heads"),
    )
    return next((why for ok, why in checks if not ok), None) or why_not_here(*given)


def table(heads: int, bits: Sequence[int], device: torch.device) -> TokenConfig:
    """The answer for so many heads of all sequences: the fastest of benchmarks/micro/kv_rows.py --tune on an H200."""
    if heads < multiprocessors(device):
        return TokenConfig(per_sm=2, tokens=64)  # long stretches: their sums are added up by a few programs
    return TokenConfig(per_sm=3, tokens=64) if max(bits) == 4 else TokenConfig(per_sm=4, tokens=32, warps=2)


def parts(widths: Sequence[int], bits: Sequence[int], fp16: bool) -> dict[str, int | float | bool]:
    """What the kernel is told about the parts; the second has no channels where there is one."""
    found: dict[str, int | float | bool] = {}
    for name, width, b in zip(("LOW", "HIGH"), (*widths, 0), (*bits, 8), strict=False):
        size = packed_width(width, 4 if b == 4 else 8)
        found |= {name: width, f"{name}_BYTES": size, f"{name}_PAD": power_of_two(max(size, 1), 16)}
        found |= {f"{name}_PACKED": b == 4, f"{name}_UP": 2.0 ** (b - 2) if fp16 else 1.0}
    return found


def kv_rows_attention(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, widths: Sequence[int], bits: Sequence[int], scaling: float, *,
    config: TokenConfig | None = None,
) -> Tensor | Refusal:
    """What the op gives, or why it is not had here."""
    check(q, k_rows, v_rows, widths, bits)
    if reason := why_not(q, k_rows, v_rows, widths, bits):
        return Refusal(reason)
    (batch, q_heads, length, d), (heads, tokens, row) = q.shape, k_rows.shape[1:]
    y = torch.empty((batch, q_heads, length, d), dtype=q.dtype, device=q.device)
    if not y.numel():
        return y
    rows = q_heads // heads * length
    groups = ceil_div(rows, TOGETHER)
    c = config or table(batch * heads * groups, bits, q.device)
    tiles = ceil_div(tokens, c.tokens)
    programs = c.per_sm * multiprocessors(q.device) // (batch * heads * groups)
    steps = max(1, ceil_div(tiles, max(1, programs)))
    splits = ceil_div(tiles, steps)
    new = lambda *shape: torch.empty((batch * heads, *shape), dtype=torch.float32, device=q.device)  # noqa: E731
    partial, sums, tops, lse = new(splits, rows, d), new(splits, rows), new(splits, rows), new(rows)
    if splits:
        kv_rows_split_kernel[(splits, groups, batch * heads)](
            q, k_rows, v_rows, partial, sums, tops, heads, length, rows, tokens, scaling, steps, splits, *q.stride()[:3],
            *k_rows.stride()[:2], *v_rows.stride()[:2], **parts(widths, bits, q.dtype == torch.float16), ROW=row, RB=TOGETHER,
            BT=c.tokens, ALIGN=alignment(k_rows, v_rows), PTX=has_inline_ptx(q.device), num_warps=c.warps, num_stages=c.stages,
            enable_fp_fusion=True, **({"maxnreg": c.registers} if c.registers else {}),
        )
    kv_token_combine_kernel[(batch * q_heads * length,)](
        partial, sums, tops, y, lse, rows, splits, D=d, DP=power_of_two(d, 16), BP=16, num_warps=4, enable_fp_fusion=True,
    )
    return y
