"""Tile code of the Hadamard kernels: what is written.

    y = k acc         q = clamp(round(k acc))

acc is the unscaled sum and k its factor: the transform's own for y, that over the activation scale for codes.  Codes take one
multiply-add, which rounds once; the quotient of ops/quantize.py rounds twice.  The sums differ by as much with their order.
Asymmetric codes are those of y as FLOAT writes it (ops/quantize_per_token.py), to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.quantize_codes import NEAR, byte_of, clamped_byte, divide_tile, round_tile
from mmqc.kernels.shared.row_scale import ROW, RowScale

LEAST_KEPT = tl.constexpr(16)
FLOAT = tl.constexpr(0)
STATIC = tl.constexpr(1)
ASYMMETRIC = tl.constexpr(2)


class Kept(NamedTuple):
    """Channels [r] of y, and memory [M, r] in x's dtype for them."""

    channels: Tensor
    y: Tensor


class Written(NamedTuple):
    """What a transform fills: y in x's dtype, or its codes by the scales ``rows``, or by scales and offsets that it fills too.

    Beside static codes some channels of y may be ``kept``, by the kernels for which this says so.
    """

    y: Tensor
    rows: RowScale | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None
    bits: int = 8
    kept: Kept | None = None

    def scale_args(self, unused: Tensor) -> dict[str, Any]:
        """Of a kernel that reads the scales ``rows``; ``unused`` stands where there are none."""
        return dict(
            scale_ptr=unused if self.rows is None else self.rows.scale, row_ptr=unused if self.rows is None else self.rows.rows
        )

    def token_args(self, unused: Tensor) -> dict[str, Any]:
        """Of a kernel that fills ``scale`` and ``offset``."""
        return dict(
            token_ptr=unused if self.scale is None else self.scale, offset_ptr=unused if self.offset is None else self.offset
        )

    def kept_args(self, unused: Tensor) -> dict[str, Any]:
        """Of a kernel that keeps channels."""
        kept = self.kept or Kept(unused, unused)
        return dict(channel_ptr=kept.channels, kept_ptr=kept.y)

    def constants(self) -> dict[str, Any]:
        """Of every kernel."""
        mode = ASYMMETRIC if self.offset is not None else STATIC if self.rows is not None else FLOAT
        return dict(
            MODE=mode.value, KIND=ROW.value if self.rows is None else self.rows.kind, LOW=-(2.0 ** (self.bits - 1)),
            HIGH=2.0 ** (self.bits - 1) - 1,
        )


@triton.jit
def store_tile(acc, k, y_ptr, at, mask, MODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr):
    """Write k acc, or its codes; k is broadcastable to acc."""
    if MODE == FLOAT:
        tl.store(y_ptr + at, (acc * k).to(y_ptr.dtype.element_ty), mask=mask)
    elif FP8:
        tl.store(y_ptr + at, tl.minimum(tl.maximum(acc * k, -448.0), 448.0).to(tl.float8e4nv), mask=mask)
    else:
        near = tl.fma(acc, k + tl.zeros_like(acc), tl.full(acc.shape, NEAR, tl.float32))
        tl.store(y_ptr + at, clamped_byte(near, LOW, HIGH), mask=mask)


@triton.jit
def kept_channels(channel_ptr, inner_ptr, column, b, B: tl.constexpr, KEPT: tl.constexpr):
    """(r, parts [r], columns of Bᵀ [B, r]) of the KEPT channels, and of others up to as many as tensor cores take."""
    r = tl.arange(0, LEAST_KEPT if KEPT <= LEAST_KEPT else 2 * LEAST_KEPT)
    channel = tl.load(channel_ptr + r, mask=r < KEPT, other=0).to(tl.int32)
    return r, channel // b, tl.load(inner_ptr + (channel % b)[None, :] * B + column[:, None])


@triton.jit
def store_kept(t, chosen_t, i, mask, r, part, kept_ptr, row, SCALE: tl.constexpr, KEPT: tl.constexpr):
    """Of t = A X [S, B], whose rows are parts i of rows ``row`` of x, the channels that are kept, if any are."""
    if KEPT > 0:
        some = tl.dot(t, chosen_t, input_precision="ieee")
        here = mask[:, None] & (i[:, None] == part[None, :]) & (r < KEPT)[None, :]
        tl.store(kept_ptr + (row * KEPT)[:, None] + r[None, :], (some * SCALE).to(kept_ptr.dtype.element_ty), mask=here)


@triton.jit
def rounded_tile(acc, SCALE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Y = SCALE acc as it would be stored."""
    return round_tile(acc * SCALE, DTYPE, PTX)


@triton.jit
def token_ends(y, mask, R: tl.constexpr, PARTS: tl.constexpr):
    """The smallest and the largest entry of each of R tokens, whose PARTS rows lie one below the other: [R PARTS] each."""
    low = tl.min(tl.where(mask, y, float("inf")), 1)
    high = tl.max(tl.where(mask, y, float("-inf")), 1)
    low, high = tl.min(tl.reshape(low, (R, PARTS)), 1), tl.max(tl.reshape(high, (R, PARTS)), 1)
    low, high = tl.broadcast_to(low[:, None], (R, PARTS)), tl.broadcast_to(high[:, None], (R, PARTS))
    return tl.reshape(low, (R * PARTS,)), tl.reshape(high, (R * PARTS,))


@triton.jit
def asymmetric_tile(y, low, s, LOW: tl.constexpr):
    """Round((y - low) / s) + LOW as int8; low and s are broadcastable to y."""
    u = divide_tile(y - low, tl.where(s > 0.0, s, 1.0))  # 0 <= u, and the largest is 2^b - 1 but for a rounding
    return byte_of(u, LOW)


@triton.jit
def write_tiles(
    y, y2, factor, y_ptr, token_ptr, offset_ptr, rows, first, at, at2, mask, mask2, MODE: tl.constexpr, SCALE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr, A2: tl.constexpr,
):
    """Write a turn's sums y [R PARTS, B] and, transposed, y2 [B, A2]; ``first`` says which rows are the first of a token."""
    if MODE == ASYMMETRIC:
        y = rounded_tile(y, SCALE, DTYPE, PTX)
        low, high = token_ends(y, mask, R, PARTS)
        if A2 > 0:
            y2, mask2_t = rounded_tile(y2, SCALE, DTYPE, PTX), tl.trans(mask2)
            low = tl.minimum(low, tl.min(tl.where(mask2_t, y2, float("inf"))))
            high = tl.maximum(high, tl.max(tl.where(mask2_t, y2, float("-inf"))))
        s = tl.div_rn(high - low, tl.full(low.shape, HIGH - LOW, tl.float32))
        tl.store(y_ptr + at, asymmetric_tile(y, low[:, None], s[:, None], LOW), mask=mask)
        if A2 > 0:  # a tile of one token: every row of it has the same ends
            tl.store(y_ptr + at2, asymmetric_tile(tl.trans(y2), tl.min(low), tl.max(s), LOW), mask=mask2)
        tl.store(token_ptr + rows, s, mask=first)
        tl.store(offset_ptr + rows, low - s * LOW, mask=first)
    else:
        store_tile(y, factor[:, None], y_ptr, at, mask, MODE, LOW, HIGH, FP8)
        if A2 > 0:
            store_tile(tl.trans(y2), tl.max(factor), y_ptr, at2, mask2, MODE, LOW, HIGH, FP8)
