"""The search for a clip in one pass over a weight: every program tries all clips on its groups.

    for p in clips:   loss = sum_k c_k |p clamp(round(u_k / p), low - z, high - z) - u_k|^n        u = w / s

Shapes:  w fp32 [R, g], a group a row   s, z fp32 [R]   c fp32 [G, g], row r's is c[r % G]   p fp32 [P]   best fp32 [R]
Why:     as tensor calls each of 80 clips reads and writes the weight nine times.
Powers:  |e|^n = 2^(n log2 |e|); sums are in another order than the reference's, which may decide between clips that are alike.
Arch:    any that Triton supports; fp32 only.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import why_not_here
from mmqc.kernels.shared.quantize_codes import divide_tile

TILE = 1024  # elements of a program's tile


@triton.jit
def power_tile(e, power):
    """|e|^power, 0 for 0."""
    return tl.exp2(tl.log2(tl.maximum(tl.abs(e), 1e-30)) * power)


@triton.jit
def power_clip_kernel(
    w_ptr, s_ptr, z_ptr, c_ptr, p_ptr, best_ptr, R, G, g, P, power,
    HAS_ZERO: tl.constexpr, HAS_COST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """BLOCK_R groups."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = rows < R
    s = tl.load(s_ptr + rows, there, other=1.0)[:, None]
    low, high = tl.full([BLOCK_R, 1], LOW, tl.float32), tl.full([BLOCK_R, 1], HIGH, tl.float32)
    if HAS_ZERO:
        z = tl.load(z_ptr + rows, there, other=0.0)[:, None]
        low, high = low - z, high - z
    least, best = tl.full([BLOCK_R], float("inf"), tl.float32), tl.full([BLOCK_R], 1.0, tl.float32)
    for i in range(P):
        p = tl.load(p_ptr + i)
        total = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for start in range(0, g, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = there[:, None] & (k < g)[None, :]
            u = divide_tile(tl.load(w_ptr + rows[:, None] * g + k[None, :], inside, other=0.0), s)  # [BR, BK]
            q = tl.minimum(tl.maximum(divide_tile(u, p + tl.zeros_like(s)), -4194304.0), 4194304.0)
            q = tl.minimum(tl.maximum((q + 12582912.0) - 12582912.0, low), high)  # half to even
            part = tl.where(inside, power_tile(q * p - u, power), 0.0)
            if HAS_COST:
                part *= tl.load(c_ptr + (rows % G)[:, None] * g + k[None, :], inside, other=0.0)
            total += part
        loss = tl.sum(total, 1)  # [BR]
        best, least = tl.where(loss < least, p, best), tl.minimum(loss, least)
    tl.store(best_ptr + rows, best, there)


def supports(w: Tensor, scale: Tensor, zero: Tensor | None, cost: Tensor | None) -> str | None:
    """None, or why these operands cannot be taken here."""
    if w.dtype != torch.float32:
        return f"weights are float32, not {w.dtype}"
    return why_not_here(w, scale, zero, cost)


def power_clip(
    w: Tensor, scale: Tensor, zero: Tensor | None, cost: Tensor | None, shrinks: Sequence[float], power: float, bits: int,
    out: Tensor | None = None,
) -> Tensor:
    """The best clips float32 [N, G, 1]; see the top of the file."""
    reason = supports(w, scale, zero, cost)
    if reason is not None:
        raise ValueError(f"power_clip: {reason}")
    n, groups, size = w.shape
    best = torch.empty((n, groups, 1), dtype=torch.float32, device=w.device) if out is None else out
    if not best.numel():
        return best
    w, s = w.contiguous(), scale.float().contiguous()
    z, c = s if zero is None else zero.float().contiguous(), s if cost is None else cost.float().contiguous()
    block = min(TILE, max(16, triton.next_power_of_2(size)))
    power_clip_kernel[(triton.cdiv(n * groups, TILE // block),)](
        w, s, z, c, _numbers(tuple(shrinks), w.device), best, n * groups, groups, size, len(shrinks), power,
        HAS_ZERO=zero is not None, HAS_COST=cost is not None, LOW=-(2.0 ** (bits - 1)), HIGH=2.0 ** (bits - 1) - 1,
        BLOCK_R=TILE // block, BLOCK_K=block, num_warps=4, enable_fp_fusion=True,
    )
    return best


@lru_cache(maxsize=32)
def _numbers(shrinks: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(shrinks, dtype=torch.float32, device=device)
