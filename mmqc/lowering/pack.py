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
        byte = load([n, j])
        # h is an outer loop: its shift is a scalar there, and j runs over lanes.
        high = ops.index_expr(h, torch.bool)
        nibble = ops.where(high, ops.bitwise_right_shift(byte, ops.constant(4, torch.uint8)), byte)
        nibble = ops.bitwise_and(nibble, ops.constant(15, torch.uint8))
        return ops.sub(ops.to_dtype(nibble, torch.int8), ops.constant(OFFSET, torch.int8))

    codes = Pointwise.create(device=w_q.get_device(), dtype=torch.int8, inner_fn=inner, ranges=[rows, 2, half])
    # A buffer of three axes: fused into a flat view, h would become a division per element.
    codes.realize()
    codes = lowerings[torch.ops.aten.view.default](codes, [rows, 2 * half])
    return lowerings[torch.ops.aten.slice.Tensor](codes, 1, 0, width) if width % 2 else codes
