"""A launch of few rows that starts before the kernel in front of it has ended (Hopper's programmatic dependent launch).

    starts_early       whether a launch of so many rows does
    prefetch_lines     asks for the weights that a program begins with, which no kernel in front writes
    await_inputs       waits for the kernel in front; from here on the kernel behind may start

Why:     of one row a product takes 5 to 25 us, of which one or two go by before its first bytes arrive: of 28 layers, a fifth.
Safe:    a line asked for is on its way into the second-level cache, which all kernels see: it is no read, and what is written in
         between counts.  Whoever starts early waits before it reads or writes anything else, and lets the next one start only
         then, so that all but the kernel in front have ended for that one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mmqc.kernels.shared.device_facts import INTERPRETED, capability

FEW_ROWS = 64  # of a tile: with more, products take longer than what comes before them
LINES = 4  # of 128 bytes, of each row: more compete with the kernel in front (28 layers: 2.04 ms with 4, 2.25 with 16; H100)


def starts_early(device: torch.device, rows: int = 1) -> bool:
    """Whether a launch of so many rows is early, so that its programs have to wait."""
    return capability(device) >= 90 and not INTERPRETED and rows <= FEW_ROWS


def early_lines(device: torch.device, block_m: int) -> int:
    """How many lines of each row of a weight a program asks for ahead of its wait; 0 for a launch that is not early."""
    return LINES if starts_early(device, block_m) else 0


@triton.jit
def prefetch_lines(rows, first, last, LINES: tl.constexpr):
    """Ask for the first LINES lines of 128 bytes of the bytes first … last of the rows [BN, 1]."""
    at = rows + tl.minimum(first + 128 * tl.arange(0, LINES), tl.maximum(last - 1, first))[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_inputs():
    """Until the kernel in front has ended and what it wrote is seen."""
    gdc_wait()
    gdc_launch_dependents()
