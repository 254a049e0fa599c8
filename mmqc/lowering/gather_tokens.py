"""gather_tokens as one pointwise node with an indirect load, which fuses with what reads it.

    y[b, ..., i, ...] = x[b, ..., index[b, i], ...]

Shapes:  those of ops/gather_tokens.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.lowering.inductor import Pointwise, TensorBox, lowerings, ops, register_lowering

aten = torch.ops.aten


@register_lowering(torch.ops.mmqc.gather_tokens.default, type_promotion_kind=None)
def lower_gather_tokens(x: TensorBox, index: TensorBox, axis: int, rank: int = 0) -> TensorBox:
    """Pointwise IR; a batch of one in x is read for every sequence."""
    while len(x.get_size()) < rank:
        x = lowerings[aten.unsqueeze.default](x, 0)
    size: list[Any] = list(x.get_size())
    at = axis % len(size)
    batch, length = index.get_size()
    load = lowerings[aten.expand.default](x, [batch, *size[1:]]).make_loader()
    load_index = index.make_loader()

    def inner(place: Sequence[Any]) -> Any:
        token = ops.indirect_indexing(load_index([place[0], place[at]]), size[at])
        return load([*place[:at], token, *place[at + 1 :]])

    ranges = [batch, *size[1:at], length, *size[at + 1 :]]
    return Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=ranges)
