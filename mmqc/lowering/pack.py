"""Unpacking int4 as pointwise IR: two contiguous streams, low nibbles then high ones (ops/pack.py).

    q[n, h, j] = (byte[n, j] >> 4 h & 15) - 8        h in {0, 1};  [N, 2, ceil(K/2)] read as [N, K]

Shapes:  byte uint8 [N, ceil(K/2)]   q int8 [N, K]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.lowering.inductor import Pointwise, TensorBox, lowerings, ops, static_int
from mmqc.ops.pack import OFFSET


def unpack(w_q: TensorBox, width: int, weight_bits: int) -> TensorBox:
    """Stored weight -> int8 codes [N, width]."""
    if weight_bits == 8:
        return w_q
    rows, half = (static_int(size) for size in w_q.get_size())
    load = w_q.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        n, h, j = index
        # h is an outer loop, so its shift is a scalar there, and j runs over lanes.  In int32 a vector takes a shift of its own;
        # a choice between two vectors of uint8 is made lane by lane (torch 2.13).
        word = ops.to_dtype(load([n, j]), torch.int32)
        nibble = ops.bitwise_and(
            ops.bitwise_right_shift(word, ops.index_expr(4 * h, torch.int32)), ops.constant(15, torch.int32)
        )
        return ops.to_dtype(ops.sub(nibble, ops.constant(OFFSET, torch.int32)), torch.int8)

    codes = Pointwise.create(device=w_q.get_device(), dtype=torch.int8, inner_fn=inner, ranges=[rows, 2, half])
    # A buffer of three axes: fused into a flat view, h would become a division per element.
    codes.realize()
    codes = lowerings[torch.ops.aten.view.default](codes, [rows, 2 * half])
    return lowerings[torch.ops.aten.slice.Tensor](codes, 1, 0, width) if width % 2 else codes
