"""Tile code: one step of K of an operand, with masks only where K is no multiple of the step."""

import triton
import triton.language as tl


@triton.jit
def load_x_tile(x_rows, k, row_mask, limit, EVEN_K: tl.constexpr):
    """Columns k of the rows at ``x_rows`` [BM, 1]; zero where row_mask is false or k is not below limit."""
    if EVEN_K:
        x = tl.load(x_rows + k[None, :], mask=row_mask, other=0.0)
    else:
        x = tl.load(x_rows + k[None, :], mask=row_mask & (k[None, :] < limit), other=0.0)
    return x


@triton.jit
def load_w_tile(w_rows, k, limit, EVEN_K: tl.constexpr):
    """Columns k of the rows at ``w_rows`` [BN, 1], all of which exist; what lies past limit meets zeros of x."""
    if EVEN_K:
        w = tl.load(w_rows + k[None, :])
    else:
        w = tl.load(w_rows + k[None, :], mask=k[None, :] < limit, other=0.0)
    return w
