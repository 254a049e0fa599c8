"""Tile code: which output tile a program works on, so that programs that run together share operands in the L2 cache."""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile (m, n) of a program: GROUP_M rows of tiles are walked column by column."""
    per_group = GROUP_M * tiles_n
    first = (program // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    inside = program % per_group
    return first + inside % rows, inside // rows
