"""Tile code: several linears of one input in one launch; a program finds out whose columns it computes.

    tile_n of the launch  ->  (linear, tile_n of that linear)        the linears' tiles of columns, one after the other

Up to three linears (q, k and v).  ``pick`` chooses a pointer or a size; with one linear it is the first and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MOST = 3


class Linear(NamedTuple):
    """One linear of a launch: weight, its scale [N] or [N, K/g], bias, result, and integer scales of groups if there are any."""

    w: Tensor
    scale: Tensor
    bias: Tensor | None
    y: Tensor
    group_scale: Tensor | None = None

    @property
    def groups(self) -> Tensor:
        """What multiplies the sums of groups."""
        return self.scale if self.group_scale is None else self.group_scale


def are_alike(linears: Sequence[Linear]) -> bool:
    """Whether one launch can take these linears: two or three of one layout, all with a bias of one dtype or none with one."""
    layouts = {(w.dtype, w.shape[1], w.stride(), s.dtype, s.shape[1:]) for w, s, *_ in linears}
    biases = {None if linear.bias is None else linear.bias.dtype for linear in linears}
    groups = {None if t is None else (t.shape[1:], t.dtype) for *_, t in linears}
    one_kind = len(layouts) == len(biases) == len(groups) == 1
    return 1 < len(linears) <= MOST and one_kind and all(linear.y.shape[1] for linear in linears)


def three(linears: Sequence[Linear]) -> list[Linear]:
    """As many as a kernel has names for; what is not there is not read."""
    return [*linears, linears[-1], linears[-1]][:MOST]


@triton.jit
def pick(which, a, b, c, LINEARS: tl.constexpr):
    """The entry of linear ``which``."""
    if LINEARS > 1:
        a = tl.where(which == 1, b, a)
    if LINEARS > 2:
        a = tl.where(which == 2, c, a)
    return a


@triton.jit
def count_tiles(N, N1, N2, BLOCK_N: tl.constexpr, LINEARS: tl.constexpr):
    """Tiles of columns, of all linears together."""
    tiles = tl.cdiv(N, BLOCK_N)
    if LINEARS > 1:
        tiles += tl.cdiv(N1, BLOCK_N)
    if LINEARS > 2:
        tiles += tl.cdiv(N2, BLOCK_N)
    return tiles


@triton.jit
def find_linear(tile_n, N, N1, BLOCK_N: tl.constexpr, LINEARS: tl.constexpr):
    """(which linear, its own tile) of a tile of the launch."""
    which, own, first = tile_n * 0, tile_n, tl.cdiv(N, BLOCK_N)
    if LINEARS > 1:
        which += (tile_n >= first).to(tl.int32)
        own = tl.where(tile_n >= first, tile_n - first, own)
    if LINEARS > 2:
        second = first + tl.cdiv(N1, BLOCK_N)
        which += (tile_n >= second).to(tl.int32)
        own = tl.where(tile_n >= second, tile_n - second, own)
    return which, own
