"""The transform of hadamard_quantize.py for few rows: several programs on each row, a slice of A and of B each.

    Y[i, j] = A[i, :] X B[j, :]ᵀ        i: 16 rows of A, j: some rows of B        X [a, b]: one row of x

Shapes:  as there, static scales or none: a program that sees a part of a row does not know its largest entry
Why:     one program reads a row, both matrices and multiplies them alone: 10 us for 18,944 entries, in which the other
         multiprocessors wait.  Here everyone reads the row, which the L2 cache holds, and a few rows of the matrices.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.hadamard.hadamard_plan import Tiling
from mmqc.kernels.hadamard.hadamard_tiles import FLOAT, kept_channels, store_kept, store_tile
from mmqc.kernels.shared.activation_tiles import input_tile
from mmqc.kernels.shared.device_facts import ceil_div, multiprocessors
from mmqc.kernels.shared.early_start import await_inputs
from mmqc.kernels.shared.row_scale import row_scale_tile

SLICE = tl.constexpr(16)  # rows of A: the smallest that tensor cores take
COLUMNS = 32  # rows of B
LEAST = 2048  # entries of a row that are worth more than one program
WAVES = 4  # programs a multiprocessor, at most


@triton.jit
def hadamard_slices_kernel(
    x_ptr, up_ptr, outer_ptr, inner_ptr, y_ptr, channel_ptr, kept_ptr, scale_ptr, row_ptr, M, n, a, b, stride_x, stride_up,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr,
    KEPT: tl.constexpr, GATED: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FP8: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):
    """Row, slice of A and slice of B are the three axes of the grid."""
    if EARLY:
        await_inputs()
    row = tl.program_id(0)
    i = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.arange(0, B)
    wide = row.to(tl.int64)
    inner_t = tl.load(inner_ptr + j[None, :] * B + column[:, None])  # [B, COLUMNS], transposed
    acc = tl.zeros((SLICE, B), tl.float32)
    for first in range(0, WIDTH, STEP):
        k = first + tl.arange(0, STEP)
        inside = k[:, None] * b + column[None, :]
        mask = (k < a)[:, None] & (column < b)[None, :]
        x = input_tile(x_ptr, up_ptr, wide * stride_x + inside, wide * stride_up + inside, mask, GATED, PTX)
        outer = tl.load(outer_ptr + i[:, None] * WIDTH + k[None, :])
        acc = tl.dot(outer, x, acc, input_precision="ieee")
    r, part, chosen_t = kept_channels(channel_ptr, inner_ptr, column, b, B, KEPT)
    first = (i < a) & (tl.program_id(2) == 0)  # all programs of a slice of A have the same rows of A X
    store_kept(acc.to(inner_t.dtype), chosen_t, i, first, r, part, kept_ptr, wide + tl.zeros((SLICE,), tl.int64), SCALE, KEPT)
    y = tl.dot(acc.to(inner_t.dtype), inner_t, input_precision="ieee")
    factor = tl.full((SLICE,), SCALE, tl.float32)
    if MODE != FLOAT:
        rows = row + tl.zeros((SLICE,), tl.int32)
        factor = tl.div_rn(factor, row_scale_tile(scale_ptr, row_ptr, rows, rows < M, KIND))
    mask = (i < a)[:, None] & (j < b)[None, :]
    store_tile(y, factor[:, None], y_ptr, wide * n + i[:, None] * b + j[None, :], mask, MODE, LOW, HIGH, FP8)


def slices(t: Tiling) -> tuple[int, int]:
    """Programs for a row along A and B."""
    return ceil_div(t.a, SLICE.value), ceil_div(t.b, min(t.B, COLUMNS))


def few(x: Tensor, t: Tiling) -> bool:
    """Whether so few rows are faster in slices."""
    along_a, along_b = slices(t)
    large = t.R == 1 and t.a > SLICE.value and x.shape[1] >= LEAST
    return large and x.shape[0] * along_a * along_b <= WAVES * multiprocessors(x.device)
