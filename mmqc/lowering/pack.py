"""Unpacking int4 as pointwise IR: two contiguous streams, low nibbles then high ones (ops/pack.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.lowering.inductor import Pointwise, TensorBox, lowerings, ops
from mmqc.ops.pack import OFFSET


def unpack(w_q: TensorBox, width: int, weight_bits: int) -> TensorBox:
    """Stored weight -> int8 codes [N, width]."""
    if weight_bits == 8:
        return w_q
    rows, half = w_q.get_size()
    load = w_q.make_loader()

    def nibble(shift: int) -> TensorBox:
        def inner(index: Sequence[Any]) -> Any:
            byte = load(index)
            byte = ops.bitwise_and(ops.bitwise_right_shift(byte, ops.constant(shift, torch.uint8)), ops.constant(15, torch.uint8))
            return ops.sub(ops.to_dtype(byte, torch.int8), ops.constant(OFFSET, torch.int8))

        return Pointwise.create(device=w_q.get_device(), dtype=torch.int8, inner_fn=inner, ranges=[rows, half])

    codes = lowerings[torch.ops.aten.cat.default]([nibble(0), nibble(4)], 1)
    return lowerings[torch.ops.aten.slice.Tensor](codes, 1, 0, width) if width % 2 else codes
